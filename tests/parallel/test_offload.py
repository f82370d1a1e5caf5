"""CPU offload and async tensor parallel: what can be seen of them without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from tests.engine.cases import Layout, recipe
from titancli.engine.build import MixedPrecision, allocate
from titancli.errors import RecipeError
from titancli.parallel import Decoder
from titancli.parallel.decoder import build
from titancli.parallel.fsdp import shard
from titancli.recipe.schema import ActivationCheckpoint, Compile
from titancli.registry.component import build as build_component


@pytest.mark.parametrize("field", ["cpu_offload", "async_tp"])
def test_a_plan_that_needs_a_gpu_says_so_without_one(field: str) -> None:
    with pytest.raises(RecipeError, match=rf"parallelize.{field} = true: .*, and this is a cpu"):
        build(
            Decoder(**{field: True}),
            mesh=None,
            device=torch.device("cpu"),
            precision=MixedPrecision(torch.float32, torch.float32),
            activation_checkpoint=ActivationCheckpoint(),
            compile=Compile(),
        )


@pytest.mark.parametrize(
    ("compile", "told"),
    [
        (Compile(), True),
        (Compile(enable=True, components=["loss"]), True),
        (Compile(enable=True, backend="aot_eager"), True),
        (Compile(enable=True), False),
    ],
)
def test_async_tp_needs_blocks_compiled_by_inductor(compile: Compile, told: bool) -> None:
    from dataclasses import replace

    found = list(Decoder(async_tp=True).check(replace(recipe(Layout()), compile=compile)))
    assert bool(found) == told


def policies() -> dict[bool, set[type]]:
    """The offload policies of all groups of a model, without and with cpu_offload."""
    found = {}
    for offload in (False, True):
        with torch.device("meta"):
            model = build_component(recipe(Layout()).model, seq_len=16)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        float32 = MixedPrecision(torch.float32, torch.float32)
        shard(model, mesh, mesh, precision=float32, reshard_after_forward="default", cpu_offload=offload)
        groups = [
            group
            for module in model.modules()
            if (state := getattr(module, "_get_fsdp_state", None)) is not None
            for group in getattr(state(), "_fsdp_param_groups", None) or [state()._fsdp_param_group]
            if group is not None
        ]
        assert len(groups) > 4
        found[offload] = {type(group.offload_policy) for group in groups}
    return found


@pytest.mark.ranks
def test_every_group_is_offloaded(ranks: Any) -> None:
    (found,) = ranks(1, policies)
    assert found == {False: {OffloadPolicy}, True: {CPUOffloadPolicy}}


def test_buffers_can_have_another_place_than_parameters() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    allocate(model, torch.device("cpu"), torch.device("meta"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {b.device.type for b in model.buffers()} == {"meta"}
