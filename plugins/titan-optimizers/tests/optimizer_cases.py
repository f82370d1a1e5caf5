"""What the ranks run: a small model that trains with one of the optimizers, stops and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import neftune_cases
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.engine import cases
from titan_optimizers import ScheduleFree
from titancli import Engine, LossResult, Sample
from titancli.models.blocks.decoder import Decoder as DecoderModel
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


def of_samples(layout: cases.Layout, optimizer: Any, fail: bool = False) -> dict[str, torch.Tensor]:
    """Return gradients of a function of samples in the third step of an optimizer, and what it saw.

    Args:
        fail: let the function raise once in that step, before the gradients are computed.
    """
    recipe = replace(cases.recipe(layout), optimizer=optimizer)
    recipe = replace(recipe, lr_scheduler=WarmupStableDecay(warmup_steps=0, decay_ratio=0.0))
    seen: list[torch.Tensor] = []

    def loss(logprobs: list[torch.Tensor], given: list[Sample]) -> LossResult:
        seen[:] = [one.detach().clone() for one in logprobs]
        if fail and engine.step == 2:
            raise ValueError("in the middle")
        return neftune_cases.squares(logprobs, given)

    with Engine.build(recipe) as engine:
        for _ in range(2):
            engine.forward_backward(neftune_cases.samples(), loss)
            engine.optim_step()
        if fail:
            with pytest.raises(ValueError, match="in the middle"):
                engine.forward_backward(neftune_cases.samples(), loss)
            fail = False
        result = engine.forward_backward(neftune_cases.samples(), loss)
        found = cases.wholes((name, p.grad) for name, p in engine.named_parameters())
        averages = cases.wholes((f"x.{name}", p) for name, p in engine.named_parameters())
        return {**found, **averages, "seen": torch.cat(seen), "given": torch.cat(result.logprobs)}


def plain_of_samples(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `schedulefree` and one process compute from the same initial weights: gradients in the
    third step, at y, and the averages x."""
    import schedulefree

    model = DecoderModel(cases.recipe(cases.small()).model)
    model.load_state_dict(weights)
    stepping = schedulefree.AdamWScheduleFree(
        model.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0, warmup_steps=0
    )
    for step in range(3):
        stepping.train()
        stepping.zero_grad()
        total = 0.0
        for sample in neftune_cases.samples():
            tokens = torch.tensor([sample.tokens])
            logits = model(tokens[:, :-1])[0].float()
            total = total + logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).sum().square()
        total.backward()
        if step < 2:
            for parameter in model.parameters():
                parameter.grad /= len(neftune_cases.samples())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            stepping.step()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    stepping.eval()
    return found | {f"x.{name}": p.detach().clone() for name, p in model.named_parameters()}
