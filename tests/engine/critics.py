"""Losses with parameters of their own, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titancli import Batch, LossResult, component, hookimpl
from titancli.models.blocks.init import normal_, zeros_


@component("loss", "critic", target="tests.engine.critics:Value")
class Critic:
    """Cross-entropy, and the squared error of a value per token."""

    goal: float = 1.0
    """What each value should be."""


class Value(nn.Module):
    output = "logprobs"
    outputs = ("hidden:-1",)

    def __init__(self, config: Critic, *, model: Any) -> None:
        super().__init__()
        self.goal = config.goal
        self.hidden = nn.Linear(model.dim, 3)
        self.scale = nn.Parameter(torch.empty(3))

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        normal_(self.hidden.weight, 0.3, generator_for("hidden.weight"))
        zeros_(self.hidden.bias)
        normal_(self.scale, 1.0, generator_for("scale"))

    def values(self, out: Tensor, batch: Batch) -> Tensor:
        return (self.hidden(batch["hidden"]) * self.scale).sum(-1).float()

    def forward(self, out: Tensor, batch: Batch) -> LossResult:
        drawn = batch["targets"] >= 0
        errors = torch.where(drawn, (self.values(out, batch) - self.goal).square(), 0.0)
        metrics = {"value_error": errors.detach().sum()}
        return LossResult(errors.sum() - out.sum(), drawn.sum(), metrics)


@component("loss", "without_beginning", target="tests.engine.critics:WithoutBeginning")
class Without:
    """Parameters without initial values."""


class WithoutBeginning(nn.Module):
    output = "logprobs"

    def __init__(self, config: Without) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, out: Tensor, batch: Batch) -> LossResult:
        return LossResult(-out.sum() * self.scale, (batch["targets"] >= 0).sum())


@component("loss", "of_part", target="tests.engine.critics:OfPart")
class Part:
    """Parameters applied to what each rank has a part of."""


class OfPart(WithoutBeginning):
    output = "projection"

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        zeros_(self.scale)


@component("loss", "weighing", target="tests.engine.critics:Weighing")
class Weights:
    """Parameters beside token weights."""


class Weighing(OfPart):
    output = "logprobs"

    def token_weights(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch["targets"]).float()


@hookimpl
def titan_components() -> list[type]:
    return [Critic]
