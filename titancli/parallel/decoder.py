"""The `decoder` plan: what a model says can be split, split.

In order: expert and tensor parallel, context parallel, activation checkpointing, compile, FSDP2; where no
parameter is shared with other ranks, casts in place of FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from titancli.distributed.mesh import Mesh
from titancli.errors import RecipeError
from titancli.models.loss import without_loss
from titancli.parallel import Decoder, async_tp
from titancli.parallel.activation_checkpoint import apply_activation_checkpoint, runs_again_outside
from titancli.parallel.compile import check_inductor, compile_model
from titancli.parallel.context import context_parallel
from titancli.parallel.expert import expert_parallel
from titancli.parallel.fsdp import gathers_its_own_way, shard, shared
from titancli.parallel.loss import loss_parallel
from titancli.parallel.tensor import on_local_parameters, tensor_parallel
from titancli.parallel.unsharded import compute_in
from titancli.protocols import Precision
from titancli.recipe.schema import ActivationCheckpoint, Compile
from titancli.registry.component import build as build_component
from titancli.registry.component import completed


def build(
    config: Decoder,
    *,
    mesh: Mesh,
    device: torch.device,
    precision: Precision,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
) -> Callable[[Any], Any]:
    """Return a callable that cuts a model on meta in place and returns it.

    Raises:
        RecipeError: a setting needs a GPU, and the device is none; or nothing can be compiled for it here.
    """
    if compile.enable:
        check_inductor(compile.backend, device)
    for key, reason in config.needs_gpu() if device.type != "cuda" else ():
        raise RecipeError(
            f"parallelize.{key} = true: {reason}, but this is a {device.type}", hint="remove it"
        )
    if config.async_tp and mesh.tp is not None:
        async_tp.enable(mesh.tp)
    reshard = config.reshard_after_forward
    if reshard == "default" and mesh.degrees.pp > 1:
        reshard = "never"  # each micro-batch would gather them again

    def parallelize(model: nn.Module) -> nn.Module:
        for degree, fault in completed("model", model).mesh_faults.items():
            if (ranks := getattr(mesh.degrees, degree)) != 1:
                raise RecipeError(f"mesh.{degree} = {ranks}: {fault}", hint=f"set mesh.{degree} = 1")
        layers: nn.ModuleDict = model.layers  # type: ignore[assignment]
        sharded = config.cpu_offload or gathers_its_own_way(model) or shared(model, mesh)
        with without_loss(model) as loss:
            if mesh.ep is not None:
                given: Any = {"group": mesh.ep.get_group(), "device": device, "dtype": precision.param}
                dispatcher = build_component(config.expert_dispatch, **given)
                expert_parallel(model.experts, mesh.ep, dispatcher)  # type: ignore[arg-type]
            if mesh.tp is not None:
                tensor_parallel(model, mesh.tp)
            if not sharded:
                compute_in(model, precision.param)
            context_parallel(model, mesh, config.context_parallel, device=device, dtype=precision.param)
            apply_activation_checkpoint(
                layers, activation_checkpoint, draws_alike=compile.cuda_graphs == "none"
            )
            if compile.enable:
                compile_model(model, compile, activation_checkpoint, device)
                if mesh.tp is not None:
                    for block in layers.values():
                        if not runs_again_outside(block, activation_checkpoint):
                            on_local_parameters(block, mesh.tp)
        if loss is not None:
            loss_parallel(loss, mesh, precision.param)
        if sharded:
            shard(
                model,
                mesh.fsdp,
                mesh.expert_fsdp,
                precision=precision,
                reshard_after_forward=reshard,
                cpu_offload=config.cpu_offload,
            )
        if config.cpu_offload:
            model.parameter_device = torch.device("cpu")  # type: ignore[assignment]
        return model

    return parallelize
