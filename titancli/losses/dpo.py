"""Direct preference optimisation (arXiv 2305.18290), with label smoothing (arXiv 2403.00409, cDPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import logsigmoid

from titancli.data.batch import IGNORE
from titancli.errors import TitanError
from titancli.losses.result import LossResult

if TYPE_CHECKING:
    from torch import Tensor

    from titancli import losses
    from titancli.data.batch import Batch


class DPO:
    """Σ −(1 − ε)·log σ(β·m) − ε·log σ(−β·m) over pairs; its weight is the number of pairs.

    m is how much more than the reference the model prefers the chosen answer, in nats. Rows 2i and 2i + 1 of
    a batch are a pair, chosen first; a pair without targets is none. The batch has `reference_logps` [B]: of
    each row the sum of its targets' log-probabilities under the reference.
    """

    output = "logprobs"
    needs = ("reference_logps",)

    def __init__(self, config: losses.DPO) -> None:
        self.config = config

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        """
        Args:
            out: [B, S] fp32 log-probabilities, 0 where there is no target.

        Raises:
            TitanError: rows are no pairs, or the batch has no `reference_logps`.
        """
        if out.shape[0] % 2:
            raise TitanError(f"the loss dpo needs pairs of rows, and was given {out.shape[0]}")
        if "reference_logps" not in batch:
            raise TitanError(
                "the loss dpo needs reference_logps [B] in the batch", hint='the loop "dpo" puts them there'
            )
        gained = self.config.beta * (out.sum(1) - batch["reference_logps"])
        chosen, rejected = gained[0::2], gained[1::2]
        pairs = (batch["targets"] != IGNORE).any(1).view(-1, 2).all(1).float()
        margin = chosen - rejected
        smoothing = self.config.label_smoothing
        each = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        told = {
            "reward_accuracy": (margin > 0).float(),
            "reward_margin": margin,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
        }
        metrics = {name: (value.detach() * pairs).sum() for name, value in told.items()}
        return LossResult(sum=(each * pairs).sum(), weight=pairs.sum(), metrics=metrics)
