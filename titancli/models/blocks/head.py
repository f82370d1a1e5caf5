"""The output projection, with the loss inside its forward.

Inside, FSDP2 has gathered the weight and will reduce its gradient; outside, it is a sharded DTensor that
plain operations cannot use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from titancli.data.batch import IGNORE

if TYPE_CHECKING:
    from titancli.data.batch import Batch
    from titancli.losses.result import LossResult
    from titancli.registry.kinds import Loss


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """log p(targets), 0 where there is none.

    Args:
        logits: [B, S, V], any float dtype.
        targets: [B, S] int64, -100 for none.

    Returns:
        [B, S] fp32.
    """
    picked = log_softmax(logits.float(), dim=-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return picked.masked_fill(targets == IGNORE, 0.0)


class Output(nn.Linear):
    """Hidden states to logits, or straight to a loss."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, batch: Batch | None = None, loss: Loss | None = None
    ) -> Tensor | LossResult:
        """[B, S, dim] -> logits [B, S, V], or a LossResult when a loss is given."""
        logits = linear(hidden, self.weight)
        if loss is None:
            return logits
        if batch is None:
            raise TypeError("a loss needs the batch that it is the loss of")
        return loss(log_probs(logits, batch["targets"]) if loss.output == "logprobs" else logits, batch)
