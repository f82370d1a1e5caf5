"""The output projection, with the loss inside its forward.

Inside, FSDP2 has gathered the weight and will reduce its gradient; outside, it is a sharded DTensor that
plain operations cannot use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.functional import linear

from titancli.losses.chunked import linear_log_probs, linear_token_loss

if TYPE_CHECKING:
    from titancli.data.batch import Batch
    from titancli.losses.result import LossResult
    from titancli.registry.kinds import Loss


class Output(nn.Linear):
    """Hidden states to logits, or straight to a loss."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, batch: Batch | None = None, loss: Loss | None = None
    ) -> Tensor | LossResult:
        """[B, S, dim] -> logits [B, S, V], or a LossResult when a loss is given."""
        if loss is None:
            return linear(hidden, self.weight)
        if batch is None:
            raise TypeError("a loss needs the batch that it is the loss of")
        if loss.output == "model":
            return loss(linear(hidden, self.weight), batch)
        token_weights = getattr(loss, "token_weights", None)
        weights = None if token_weights is None else token_weights(batch)
        if weights is None:
            return loss(linear_log_probs(hidden, self.weight, batch["targets"]), batch)
        # The loss says what its parts weigh; its sum is known with its gradient already.
        total, log_probs = linear_token_loss(hidden, self.weight, batch["targets"], weights)
        return loss(log_probs, batch)._replace(sum=total)
