"""What the ranks run: titan's own small Llama 3 of tests/engine, a little wider, with the converter."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.engine import cases
from tests.engine.cases import Layout
from titan_float8 import Float8Linear
from titan_float8.linear import build
from titancli.engine import Engine
from titancli.layout.degrees import Degrees
from titancli.models import Llama3
from titancli.recipe.schema import Recipe

# Sides are multiples of 16, as float8 wants them.
MODEL: dict[str, Any] = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=128, vocab_size=64)
GATHER = {"enable_fsdp_float8_all_gather": True}
PRECOMPUTE = {**GATHER, "precompute_float8_dynamic_scale_for_fsdp": True}
RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "rowwise": {"recipe": "rowwise"},
    "rowwise_with_gw_hp": {"recipe": "rowwise_with_gw_hp"},
    "gather": GATHER,
    "precompute": PRECOMPUTE,
}


def recipe(layout: Layout, fields: dict[str, Any] | None, **training: Any) -> Recipe:
    """`fields`: the converter's; None: no converter."""
    converters = [] if fields is None else [Float8Linear(**{"skip": ["output"], **fields})]
    config = Llama3(**MODEL, tied=layout.tied)
    return replace(cases.recipe(layout, **training), model=config, converters=converters)


def engine(layout: Layout, fields: dict[str, Any] | None, **training: Any) -> Engine:
    return Engine.build(recipe(layout, fields, **training))


def gradients(layout: Layout, fields: dict[str, Any] | None) -> dict[str, Tensor]:
    """Return the sums of one step's gradients over all rows, and the loss."""
    made = engine(layout, fields)
    loss = made.forward_backward(cases.my_batches(made))["loss"].clone()
    return {**{name: cases.whole(p.grad) for name, p in made.named_parameters()}, "loss": loss}


def train(made: Engine, steps: int, *, one_batch: bool = False) -> list[float]:
    losses = []
    for _ in range(steps):
        batches = cases.my_batches(made, 0 if one_batch else made.step)
        losses.append(made.forward_backward(batches)["loss"].item())
        made.optim_step()
    return losses


def losses(layout: Layout, fields: dict[str, Any] | None, steps: int) -> list[float]:
    """On one batch again and again, so that the loss must fall."""
    return train(engine(layout, fields), steps, one_batch=True)


def trained_weights(layout: Layout, fields: dict[str, Any] | None) -> dict[str, Tensor]:
    """Without clipping: the norm's rounding differs by layout, and float8 makes a step of its own of that."""
    made = engine(layout, fields, max_norm=0.0)
    train(made, 3)
    return plain_weights(made)


def plain_weights(made: Engine) -> dict[str, Tensor]:
    return {name: cases.whole(tensor) for name, tensor in made.plain_parameters()}


def initial_weights(layout: Layout, fields: dict[str, Any] | None) -> dict[str, Tensor]:
    return plain_weights(engine(layout, fields))


def saved(made: Engine) -> dict[str, Tensor]:
    """Return the gathered state that a checkpoint would hold."""
    tensors, _ = made.save_state()
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert type(local) is Tensor, f"{name} is a {type(local).__name__}"
    return {name: cases.whole(tensor) for name, tensor in tensors.items()}


def save_and_load(
    layout: Layout, saver: dict[str, Any] | None, loader: dict[str, Any] | None, folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that one kind of engine saves, and those of the other after it loaded them."""
    first, second = engine(layout, saver), engine(layout, loader)
    train(first, 2)
    first.save(folder)
    second.load(folder)
    return saved(first), saved(second)


def resume(layout: Layout, fields: dict[str, Any], folder: str) -> tuple[list[float], list[float]]:
    """Losses of steps 3 and 4 of a run that went on, and of one that was resumed."""
    straight, resumed = engine(layout, fields), engine(layout, fields)
    train(straight, 2)
    straight.save(folder)
    resumed.load(folder)
    return train(straight, 2), train(resumed, 2)


def load_over(layout: Layout, fields: dict[str, Any], folder: str) -> tuple[list[float], list[float]]:
    """Do the same for an engine that had already trained, far away from what it then loads."""
    straight, reused = engine(layout, fields), engine(layout, fields)
    train(straight, 2)
    straight.save(folder)
    reused.forward_backward(cases.my_batches(reused))
    reused.optim_step(lr=10.0)
    reused.load(folder)
    return train(straight, 2), train(reused, 2)


def start_from(
    layout: Layout, fields: dict[str, Any], folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of a run without the converter, and of one with it that begins with them."""
    first = engine(layout, None)
    train(first, 2)
    first.save(folder)
    second = Engine.build(replace(recipe(layout, fields), weights=Path(folder)))
    return plain_weights(first), plain_weights(second)


def hf_weights(layout: Layout, fields: dict[str, Any] | None) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine(layout, fields).weights() if tensor is not None}


def float8_alone(fields: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Build a group of float8 weights only, cut unevenly over the ranks.

    Returns:
        What comes out of it, what comes out of the whole layers, and what this rank sends of the last one.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 80, bias=False))
    rows = torch.randn(8, 32)
    whole, cut = copy.deepcopy(layers), copy.deepcopy(layers)
    build(Float8Linear(), mesh=Degrees(), compile=False).convert(whole)
    build(Float8Linear(**fields), mesh=Degrees(), compile=False).convert(cut)
    fully_shard(cut)
    found = cut(rows)
    found.sum().backward()
    weight = cut[1].weight
    local: Any = weight.to_local().detach()
    (sent,), _ = local.fsdp_pre_all_gather(weight.device_mesh, weight.shape, weight.stride(), cut[1], None)
    return found.detach(), whole(rows).detach(), sent
