"""CPU offload and async tensor parallel: what can be seen of them without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from tests.engine import cases
from tests.engine.cases import Layout, recipe
from titancli.engine.build import MixedPrecision
from titancli.engine.first_weights import allocate
from titancli.errors import RecipeError
from titancli.parallel import Decoder, fsdp
from titancli.parallel.decoder import build
from titancli.parallel.fsdp import shard
from titancli.recipe.schema import ActivationCheckpoint, Compile
from titancli.registry.component import build as build_component


@pytest.mark.parametrize("field", ["cpu_offload", "async_tp"])
def test_a_plan_that_needs_a_gpu_says_so_without_one(field: str) -> None:
    with pytest.raises(RecipeError, match=rf"parallelize.{field} = true: .*, but this is a cpu"):
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


def trained(offload: bool) -> dict[str, torch.Tensor]:
    """Weights after some steps. Between a CPU and itself nothing moves, so its memory need not be pinned, and
    all of FSDP2's and the engine's code for offloading runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "CPUOffloadPolicy", lambda: CPUOffloadPolicy(pin_memory=False))
        patch.setattr(Decoder, "needs_gpu", lambda self: iter(()))
        made = cases.recipe(Layout({"dp_shard": 2}))
        plan = replace(made.parallelize, cpu_offload=offload)
        patch.setattr(cases, "recipe", lambda layout: replace(made, parallelize=plan))
        return cases.training(Layout({"dp_shard": 2}))


@pytest.mark.ranks
def test_offloading_changes_no_weight(ranks: Any) -> None:
    kept, offloaded = ranks(2, trained, False)[0], ranks(2, trained, True)[0]
    assert all(torch.equal(kept[name], offloaded[name]) for name in kept)


def test_buffers_can_have_another_place_than_parameters() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    allocate(model, torch.device("cpu"), torch.device("meta"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {b.device.type for b in model.buffers()} == {"meta"}
