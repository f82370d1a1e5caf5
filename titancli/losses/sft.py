"""Supervised fine-tuning: cross-entropy of the targets, each with a weight where the batch has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from titancli.protocols import LossDefaults
from titancli.protocols.batch import IGNORE
from titancli.protocols.result import LossResult, check_shape

if TYPE_CHECKING:
    from torch import Tensor

    from titancli.protocols.batch import Batch


class SFT(LossDefaults):
    """−Σ w·log p(target); its weight is Σ w over the targets."""

    output = "logprobs"
    weighted = True

    def __init__(self, config: Any = None) -> None:
        """Take the config, which has no fields."""

    def check_batch(self, batch: Batch) -> None:
        """
        Raises:
            TitanError: there are `weights`, and not one for each token.
        """
        if "weights" in batch:
            check_shape(batch, "weights", "BS", "sft")

    def token_weights(self, batch: Batch) -> Tensor:
        """[B, S] fp32: the batch's `weights`, or 1, where there is a target; else 0."""
        there = batch["targets"] != IGNORE
        return torch.where(there, batch["weights"].float(), 0.0) if "weights" in batch else there.float()

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        """
        Args:
            out: [B, S] fp32 log-probabilities, 0 where there is no target.
        """
        weights = self.token_weights(batch)
        return LossResult(sum=-(weights * out).sum(), weight=weights.sum())
