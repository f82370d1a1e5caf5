"""Cross-entropy of next tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import functional

from titancli.protocols import LossDefaults
from titancli.protocols.batch import IGNORE
from titancli.protocols.result import LossResult

if TYPE_CHECKING:
    from torch import Tensor

    from titancli.protocols.batch import Batch


class CrossEntropy(LossDefaults):
    """−Σ log p(target); its weight is the number of targets."""

    output = "logprobs"

    def __init__(self, config: Any = None) -> None:
        """Take the config, which has no fields."""

    def token_weights(self, batch: Batch) -> Tensor:
        """[B, S] fp32: 1 where there is a target."""
        return (batch["targets"] != IGNORE).float()

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        """
        Args:
            out: [B, S] fp32 log-probabilities, 0 where there is no target.
        """
        return LossResult(sum=-out.sum(), weight=_targets(batch))


class CrossEntropyFull(LossDefaults):
    """The same from logits [B, S, V]."""

    output = "model"
    needs = ("targets",)

    def __init__(self, config: Any = None) -> None:
        """Take the config, which has no fields."""

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        """
        Args:
            out: [B, S, V] logits.
        """
        logits, targets = out.flatten(0, 1).float(), batch["targets"].flatten()
        total = functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
        return LossResult(sum=total, weight=_targets(batch))


def _targets(batch: Batch) -> Tensor:
    return (batch["targets"] != IGNORE).sum().float()
