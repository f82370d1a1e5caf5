"""The smoothed loss. It asks for the raw output, the logits, since it looks at the whole vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from titancli import Batch, LossResult

if TYPE_CHECKING:
    from titan_fixture import Smoothed as Config


class Smoothed:
    output: Literal["model"] = "model"

    def __init__(self, config: Config) -> None:
        self.smoothing = config.smoothing

    def __call__(self, out: torch.Tensor, batch: Batch) -> LossResult:
        """`out`: logits [B, S, V]."""
        targets = batch["targets"]
        total = torch.nn.functional.cross_entropy(
            out.float().flatten(0, 1),
            targets.flatten(),
            ignore_index=-100,
            reduction="sum",
            label_smoothing=self.smoothing,
        )
        return LossResult(total, (targets != -100).sum().float())
