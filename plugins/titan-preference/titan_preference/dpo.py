"""Direct preference optimisation (arXiv 2305.18290), with label smoothing (arXiv 2403.00409, cDPO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.functional import logsigmoid

from titancli.errors import TitanError
from titancli.protocols import LossDefaults
from titancli.protocols.batch import IGNORE
from titancli.protocols.result import LossResult

if TYPE_CHECKING:
    from torch import Tensor

    import titan_preference as preference
    from titancli.protocols.batch import Batch


class DPO(LossDefaults):
    """Σ −(1 − ε)·log σ(β·m) − ε·log σ(−β·m) over pairs; its weight is the number of pairs.

    m is how much more than the reference the model prefers the chosen answer, in nats. Rows 2i and 2i + 1 of
    a batch are a pair, chosen first; a pair without targets is none. The batch has
    `reference_row_logprobs` [B]: of each row the sum of its targets' log-probabilities under the reference.
    """

    output = "logprobs"
    needs: Mapping[str, Literal["B", "BS"]] = {"reference_row_logprobs": "B"}

    def __init__(self, config: preference.DPO) -> None:
        self.config = config

    def check_batch(self, batch: Batch) -> None:
        """
        Raises:
            TitanError: rows are no pairs.
        """
        if batch.rows % 2:
            raise TitanError(
                f"the loss dpo needs pairs of rows, but got {batch.rows}",
                hint="rows 2i and 2i + 1 form a pair, with the chosen answer first",
            )

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        """
        Args:
            out: [B, S] fp32 log-probabilities, 0 where there is no target.
        """
        pairs = (batch["targets"] != IGNORE).any(1).view(-1, 2).all(1)
        # Before anything is computed with what stands at no pair: NaN would come back from it in backward.
        counted = pairs.repeat_interleave(2)
        gained = self.config.beta * torch.where(counted, out.sum(1) - batch["reference_row_logprobs"], 0.0)
        chosen, rejected = gained[0::2], gained[1::2]
        margin = chosen - rejected
        smoothing = self.config.label_smoothing
        each = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        values = {
            "reward_accuracy": (margin > 0).float(),
            "reward_margin": margin,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
        }
        metrics = {name: torch.where(pairs, value.detach(), 0.0).sum() for name, value in values.items()}
        return LossResult(torch.where(pairs, each, 0.0).sum(), pairs.sum().float(), metrics)
