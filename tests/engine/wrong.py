"""A loss component for tests: cross-entropy whose numbers go wrong at some steps, on one rank alone."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from titancli.losses.cross_entropy import CrossEntropy
from titancli.protocols.result import LossResult
from titancli.registry.component import component

Fault = Literal["none", "nan loss", "inf gradient", "spike"]


@component("loss", "wrong", target="tests.engine.wrong:build")
class Wrong:
    """Cross-entropy with a fault."""

    fault: Fault = "nan loss"
    rank: int = 0
    calls: list[int]
    """Counted from 1; with one micro-batch a step, the steps."""


class WrongLoss(CrossEntropy):
    def token_weights(self, batch: Any) -> None:
        """Or the head would make the sum by itself."""

    def __init__(self, config: Wrong) -> None:
        super().__init__()
        self._config, self._calls = config, 0

    def __call__(self, out: Any, batch: Any) -> LossResult:
        result = super().__call__(out, batch)
        self._calls += 1
        here = int(os.environ.get("RANK", "0")) == self._config.rank
        if not here or self._calls not in self._config.calls:
            return result
        return result._replace(sum=spoiled(result.sum, self._config.fault))


def spoiled(total: torch.Tensor, fault: str) -> torch.Tensor:
    if fault == "nan loss":
        return total * torch.nan
    if fault == "spike":
        return total * 100
    if fault == "inf gradient":
        total = total.clone()
        total.register_hook(lambda gradient: gradient * torch.inf)
    return total


def build(config: Wrong) -> WrongLoss:
    return WrongLoss(config)
