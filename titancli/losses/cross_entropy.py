"""Cross-entropy of next tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titancli.data.batch import IGNORE
from titancli.losses.result import LossResult

if TYPE_CHECKING:
    from torch import Tensor

    from titancli.data.batch import Batch


class CrossEntropy:
    """−Σ log p(target); its weight is the number of targets."""

    output = "logprobs"

    def __init__(self, config: Any = None) -> None:
        """The config has no fields."""

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        """
        Args:
            out: [B, S] fp32 log-probabilities, 0 where there is no target.
        """
        return LossResult(sum=-out.sum(), weight=(batch["targets"] != IGNORE).sum().float())
