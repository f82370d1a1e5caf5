"""What the ranks run: a small model that trains with one of the optimizers, stops and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.engine import cases
from titan_optimizers import ScheduleFree
from titancli import Engine
from titancli.optimizers import WarmupStableDecay
from titancli.registry.component import build


def trained(
    layout: cases.Layout,
    optimizer: Any,
    steps: int = 3,
    *,
    load: Path | None = None,
    save: Path | None = None,
) -> dict[str, torch.Tensor]:
    """Return whole parameters and state after some steps of an engine."""
    recipe = replace(cases.recipe(layout), optimizer=optimizer)
    if isinstance(getattr(optimizer, "optimizer", optimizer), ScheduleFree):
        recipe = replace(recipe, lr_scheduler=WarmupStableDecay(warmup_steps=0, decay_ratio=0.0))
    with Engine.build(recipe) as engine:
        if load is not None:
            engine.load(load)
        while engine.step < steps:
            engine.forward_backward(cases.my_batches(engine, engine.step))
            engine.optim_step()
        if save is not None:
            engine.save(save)
        tensors, _ = engine.save_state()
        return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in tensors.items()}


def enter(optimizer: Any) -> None:
    """Let an optimizer that takes part in backward passes, if it is one, see one without gradients."""
    if hasattr(optimizer, "around_backward"):
        with optimizer.around_backward(None):
            pass


def places(optimizer: Any) -> set[str]:
    """Return the devices of an optimizer's state for parameters in another place than their mesh."""
    mesh = init_device_mesh("cpu", (1,))
    named = {
        f"layers.{n}": nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)]))
        for n, shape in enumerate([(64, 96), (7,)])
    }
    roles = dict.fromkeys(named, "matrix")
    stepped = build(optimizer, named_parameters=list(named.items()), roles=roles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceMesh, "device_type", "meta")
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        enter(stepped)
        stepped.step()
    values = [value for state in stepped.state.values() for value in state.values()]
    return {(value.to_local() if isinstance(value, DTensor) else value).device.type for value in values}
