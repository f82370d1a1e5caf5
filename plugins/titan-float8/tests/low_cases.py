"""What the ranks run: small models of dense layers and of experts, with converters to low precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.engine import cases
from tests.engine.cases import Layout
from titan_float8 import Float8Experts, MXFP8Experts, MXFP8Linear, NVFP4Experts, NVFP4Linear
from titancli.engine import Engine
from titancli.models import GptOss, Llama3, Qwen3
from titancli.models.sections import MoE
from titancli.recipe.schema import Recipe

SIZES: dict[str, Any] = dict(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64)
ROUTING: dict[str, Any] = dict(score_func="softmax", route_norm=True, score_before_experts=False)
DENSE = Llama3(**SIZES, hidden_dim=128)
EXPERTS = Qwen3(**SIZES, head_dim=32, moe=MoE(num_experts=4, top_k=2, hidden_dim=128, **ROUTING))
TRANSPOSED = GptOss(
    **SIZES,
    head_dim=32,
    sliding_window=8,
    moe=MoE(num_experts=4, top_k=2, hidden_dim=128, gate_bias=True, **ROUTING),
)
"""With stacks [in, out], biases and gate and up projection in one."""

NEAREST: dict[str, Any] = {"stochastic_rounding": False}
LINEARS: dict[str, Any] = {
    "mxfp8_linear": MXFP8Linear(skip=["output"]),
    "mxfp8_linear floor": MXFP8Linear(skip=["output"], scale_calculation_mode="floor"),
    "mxfp8_linear wgrad_with_hp": MXFP8Linear(skip=["output"], wgrad_with_hp=True),
    "nvfp4_linear": NVFP4Linear(skip=["output"], **NEAREST),
}
STACKS: dict[str, Any] = {
    "float8_experts": Float8Experts(),
    "float8_experts blockwise": Float8Experts(recipe="blockwise"),
    "mxfp8_experts": MXFP8Experts(),
    "mxfp8_experts wgrad_with_hp": MXFP8Experts(wgrad_with_hp=True),
    "nvfp4_experts": NVFP4Experts(**NEAREST),
    "nvfp4_experts wgrad_with_hp": NVFP4Experts(wgrad_with_hp=True, **NEAREST),
}
EVERY = {**LINEARS, **STACKS}


def layout_of(name: str, mesh: dict[str, int] | None = None, **more: Any) -> Layout:
    """Return a layout with the converter of this name, and a model that it converts."""
    config = EXPERTS if name in STACKS else DENSE
    return Layout(mesh or {}, **{"config": config, "converters": [EVERY[name]], **more})


def gradients(layout: Layout) -> dict[str, Tensor]:
    """Return the sums of one step's gradients over all rows, and the loss."""
    with Engine.build(cases.recipe(layout)) as made:
        loss = made.forward_backward(cases.my_batches(made))["loss"].clone()
        return {**{name: cases.whole(p.grad) for name, p in made.named_parameters()}, "loss": loss}


def losses(layout: Layout, steps: int) -> list[float]:
    """On one batch again and again, so that the loss must fall."""
    with Engine.build(cases.recipe(layout)) as made:
        return train(made, steps, one_batch=True)


def train(made: Engine, steps: int, *, one_batch: bool = False) -> list[float]:
    found = []
    for _ in range(steps):
        batches = cases.my_batches(made, 0 if one_batch else made.step)
        found.append(made.forward_backward(batches)["loss"].item())
        made.optim_step()
    return found


def resume(layout: Layout, folder: str) -> tuple[list[float], list[float]]:
    """Losses of steps 3 and 4 of a run that went on, and of one that was resumed."""
    with Engine.build(cases.recipe(layout)) as straight, Engine.build(cases.recipe(layout)) as resumed:
        train(straight, 2)
        straight.save(folder)
        resumed.load(folder)
        return train(straight, 2), train(resumed, 2)


def parameters(layout: Layout) -> dict[str, tuple[type, torch.Size]]:
    with Engine.build(cases.recipe(layout)) as made:
        return {name: (type(p.detach()), p.shape) for name, p in made.named_parameters()}


def recipe_with(config: Any, converters: list[Any], **more: Any) -> Recipe:
    return replace(cases.recipe(Layout(config=config, converters=converters)), **more)
