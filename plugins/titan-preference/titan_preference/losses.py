"""The losses: each is a sum over pairs, and its weight is the number of pairs; those of KTO over answers.

Rows 2i and 2i + 1 of a batch are a pair, the chosen answer first. A pair with a row without targets is
padding and does not count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import logsigmoid

from titancli import IGNORE, LossResult, report
from titancli.errors import TitanError

if TYPE_CHECKING:
    from torch import Tensor

    from titan_preference import Ipo as IpoConfig
    from titan_preference import Kto as KtoConfig
    from titan_preference import Orpo as OrpoConfig
    from titan_preference import Simpo as SimpoConfig
    from titancli import Batch


class Pairwise(ABC):
    """The common part: means over the tokens of each answer, and metrics."""

    output = "logprobs"

    def __init__(self, config: Any) -> None:
        self.config = config

    def check_batch(self, batch: Batch) -> None:
        """Check that rows form pairs.

        Raises:
            TitanError: the number of rows is odd.
        """
        if batch.rows % 2:
            raise TitanError(
                f"the loss {type(self).__name__.lower()} needs pairs of rows, but got {batch.rows}",
                hint="rows 2i and 2i + 1 form a pair, with the chosen answer first",
            )

    @abstractmethod
    def scores(self, sums: Tensor, batch: Batch) -> Tensor:
        """Return the scores to compare, [B] fp32, from the summed log-probabilities of the answers, [B]; they
        are later divided by the answers' lengths."""

    @abstractmethod
    def each(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair, [B / 2], from the mean scores of its answers."""

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        """
        Args:
            out: [B, S] fp32 log-probabilities, 0 where there is no target.
        """
        lengths = (batch["targets"] != IGNORE).sum(1)
        pairs = (lengths > 0).view(-1, 2).all(1)
        # Before computing with the other rows, from which NaN would return in backward.
        counted = pairs.repeat_interleave(2)
        means = torch.where(counted, self.scores(out.sum(1), batch), -1.0) / lengths.clamp(min=1)
        chosen, rejected = means[0::2], means[1::2]
        total = torch.where(pairs, self.each(chosen, rejected), 0.0).sum()
        rewards = self.config.beta * means.detach()
        margin = rewards[0::2] - rewards[1::2]
        values = {
            "reward_accuracy": (margin > 0).float(),
            "reward_margin": margin,
            "reward_chosen": rewards[0::2],
            "reward_rejected": rewards[1::2],
        }
        metrics = {name: torch.where(pairs, value, 0.0).sum() for name, value in values.items()}
        return LossResult(total, pairs.sum().float(), metrics)


class Ipo(Pairwise):
    """(Δ − 1 / (2 β))², Δ the difference of mean log-ratios to the reference."""

    needs: ClassVar = {"reference_row_logprobs": "B"}

    def __init__(self, config: IpoConfig) -> None:
        super().__init__(config)

    def scores(self, sums: Tensor, batch: Batch) -> Tensor:
        return sums - batch["reference_row_logprobs"]

    def each(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * self.config.beta)).square()


class Simpo(Pairwise):
    """−log σ(β Δ − γ), Δ the difference of mean log-probabilities."""

    def __init__(self, config: SimpoConfig) -> None:
        super().__init__(config)

    def scores(self, sums: Tensor, batch: Batch) -> Tensor:
        return sums

    def each(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(self.config.beta * (chosen - rejected) - self.config.gamma)


class Orpo(Pairwise):
    """−log p(chosen) / length − λ log σ(log odds(chosen) − log odds(rejected)), p the mean over tokens."""

    def __init__(self, config: OrpoConfig) -> None:
        super().__init__(config)

    def scores(self, sums: Tensor, batch: Batch) -> Tensor:
        return sums

    def each(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        odds = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
        return -chosen - self.config.beta * logsigmoid(odds)


class ApoZeroUnpaired:
    """λ_D (1 − σ(β r)) for desirable answers, λ_U σ(β r) for others, r the log-ratio to the reference."""

    output = "logprobs"
    needs: ClassVar = {"reference_row_logprobs": "B", "desirable": "B"}

    def __init__(self, config: KtoConfig) -> None:
        self.config = config

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        """
        Args:
            out: [B, S] fp32 log-probabilities, 0 where there is no target.
        """
        there = (batch["targets"] != IGNORE).any(1)
        desirable = batch["desirable"] > 0
        # Before computing with the other rows, from which NaN would return in backward.
        ratios = torch.where(there, out.sum(1) - batch["reference_row_logprobs"], 0.0)
        margin = self.config.beta * (ratios - self.zero(batch))
        gained, lost = self.config.desirable_weight, self.config.undesirable_weight
        weight = torch.where(desirable, margin.new_tensor(gained), margin.new_tensor(lost))
        each = weight * torch.sigmoid(torch.where(desirable, -margin, margin))
        rewards = self.config.beta * ratios.detach()
        for name, kind in (("desirable", there & desirable), ("undesirable", there & ~desirable)):
            report(f"reward_{name}", torch.where(kind, rewards, 0.0).sum(), count=kind.sum())
        metrics = {"reward_accuracy": (margin.detach() > 0) == desirable, **self.more(batch)}
        summed = {name: torch.where(there, value.float(), 0.0).sum() for name, value in metrics.items()}
        return LossResult(torch.where(there, each, 0.0).sum(), there.sum().float(), summed)

    def zero(self, batch: Batch) -> Tensor | float:
        """Return the log-ratio from which an answer counts as a gain, [B] or one number."""
        return 0.0

    def more(self, batch: Batch) -> dict[str, Tensor]:
        """Return further metrics, [B] each."""
        return {}


class Kto(ApoZeroUnpaired):
    """The same with r − z in place of r, z the estimate of the KL divergence from the reference."""

    needs: ClassVar = {**ApoZeroUnpaired.needs, "kl": "B"}

    def zero(self, batch: Batch) -> Tensor | float:
        return torch.where((batch["targets"] != IGNORE).any(1), batch["kl"], 0.0)

    def more(self, batch: Batch) -> dict[str, Tensor]:
        return {"kl": batch["kl"]}


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 − eˣ) for x < 0, accurate both near 0 and far from it (Mächler, 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453  # log 2
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )
