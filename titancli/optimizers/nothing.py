"""The optimizer of a rank that has nothing to train."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Nothing(torch.optim.Optimizer):
    """An optimizer without parameters, for a pipeline stage whose parameters are all frozen.

    torch's own optimizers reject an empty list.
    """

    def __init__(self, lr: float) -> None:
        super().__init__([nn.Parameter(torch.empty(0))], {"lr": lr})
        self.param_groups[0]["params"].clear()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return None if closure is None else closure()
