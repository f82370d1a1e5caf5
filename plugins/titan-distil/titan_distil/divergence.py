"""Divergences of distributions over a vocabulary, and their gradients, for the logits of some rows.

With a group the vocabulary is sharded over its ranks: each has some columns of all logits, and they exchange
one number of each row at a time. Values are then the same on all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from titancli.distributed.collectives import Group, all_reduce

if TYPE_CHECKING:
    from torch import Tensor

TENSORS = 6
"""Number of tensors of the size of the student's logits in fp32 that exist at once."""


ROUNDING = 1e-7
"""The smallest probability that is left when those of the most probable tokens are summed up in fp32."""
SMALLEST = 1e-30


class Rows(NamedTuple):
    """What is computed for some rows."""

    divergence: Tensor
    """[n], in nats."""
    log_probs: Tensor
    """[n]: the student's log-probabilities of the targets; 0 where there is no target."""
    gradient: Tensor | None
    """[n, V], by the student's logits, of each row's own loss."""


@dataclass(frozen=True)
class Divergence:
    """(1 − w) · divergence − w · log p(target), of each row."""

    kind: str
    """forward_kl, reverse_kl or jsd."""
    beta: float = 0.5
    """See `titan_distil.DistilLoss`, as for the following."""
    temperature: float = 1.0
    sft_weight: float = 0.0

    def __call__(
        self,
        student: Tensor,
        teacher: Tensor,
        targets: Tensor,
        *,
        group: Group | None = None,
        wants_gradient: bool = True,
    ) -> Rows:
        """Compute the loss of some rows.

        Args:
            student: [n, V] logits, of any float dtype; not overwritten.
            teacher: [n, V] logits.
            targets: [n] int64; negative is no target. They do not matter to the divergence.
            group: the ranks that the vocabulary is sharded over, evenly.
        """
        student = student.to(torch.promote_types(student.dtype, torch.float32))
        log_student = _log_softmax(student / self.temperature, group)
        log_teacher = _log_softmax(teacher.to(student.dtype) / self.temperature, group)
        divergence, gradient = self._compare(log_student, log_teacher, group)
        del log_teacher
        plain = log_student if self.temperature == 1.0 else _log_softmax(student.clone(), group)
        return self._mixed(divergence, gradient if wants_gradient else None, plain, targets, group)

    def of_top(
        self,
        student: Tensor,
        log_top: Tensor,
        ids: Tensor,
        targets: Tensor,
        *,
        group: Group | None = None,
        wants_gradient: bool = True,
    ) -> Rows:
        """Compute the loss of some rows from the teacher's most probable tokens, as if all others were one
        token: at most the divergence of the whole vocabulary, with the temperature 1.

        Args:
            student: as above.
            log_top: [n, K] fp32: the teacher's log-probabilities of K tokens.
            ids: [n, K] int64: which these are, each once, fewer than the vocabulary has.
        """
        student = student.to(torch.promote_types(student.dtype, torch.float32))
        plain = _log_softmax(student.clone(), group)
        own = ids if group is None else ids - group.rank * plain.shape[1]
        here = (own >= 0) & (own < plain.shape[1])
        columns = own.clamp(0, plain.shape[1] - 1)
        log_own = plain.gather(1, columns).masked_fill_(~here, 0.0)
        rest = plain.exp()
        rest.scatter_add_(1, columns, -log_own.exp().masked_fill_(~here, 0.0))
        others = _sum(rest, group).clamp_(min=SMALLEST)[:, None]
        log_own = log_own if group is None else all_reduce(log_own, "sum", group)
        log_top = log_top.to(plain.dtype)
        left = (1 - log_top.exp().sum(1, keepdim=True)).clamp_(min=ROUNDING)
        # The logit of all others together is the log of the sum of their exponentials.
        cells = torch.cat((log_own, others.log()), 1), torch.cat((log_top, left.log()), 1)
        divergence, of_cells = self._compare(*cells, None)
        gradient = rest.mul_(of_cells[:, -1:] / others)
        gradient.scatter_add_(1, columns, of_cells[:, :-1].masked_fill(~here, 0.0))
        return self._mixed(divergence, gradient if wants_gradient else None, plain, targets, group)

    def _mixed(
        self, divergence: Tensor, gradient: Tensor | None, plain: Tensor, targets: Tensor, group: Group | None
    ) -> Rows:
        """Add the cross-entropy's part.

        Args:
            gradient: by the logits over the temperature; overwritten.
            plain: log-probabilities of the temperature 1.
        """
        log_probs, columns, here = _picked(plain, targets, group)
        if gradient is None:
            return Rows(divergence, log_probs, None)
        gradient = gradient.mul_((1 - self.sft_weight) / self.temperature)
        if self.sft_weight:
            there = (targets >= 0).to(plain.dtype)
            gradient.addcmul_(plain.exp(), there[:, None], value=self.sft_weight)
            gradient.scatter_add_(1, columns, -self.sft_weight * here.to(plain.dtype)[:, None])
        return Rows(divergence, log_probs, gradient)

    def _compare(
        self, log_student: Tensor, log_teacher: Tensor, group: Group | None
    ) -> tuple[Tensor, Tensor]:
        """Return the divergence, and its gradient by the logits over the temperature."""
        student, teacher = log_student.exp(), log_teacher.exp()
        if self.kind == "forward_kl":
            value = _sum(teacher * (log_teacher - log_student), group)
            return value, student.sub_(teacher)
        if self.kind == "reverse_kl":
            ratio = log_student - log_teacher
            value = _sum(student * ratio, group)
            return value, student.mul_(ratio.sub_(value[:, None]))
        # d/dp of β KL(teacher || mixture) + (1 − β) KL(student || mixture) is (1 − β) log(student / mixture).
        mixture = torch.logaddexp(log_student + math.log1p(-self.beta), log_teacher + math.log(self.beta))
        of_teacher = self.beta * _sum(teacher.mul_(log_teacher - mixture), group)
        slope = (log_student - mixture).mul_(1 - self.beta)
        of_student = _sum(student * slope, group)
        return of_teacher + of_student, student.mul_(slope.sub_(of_student[:, None]))


def _log_softmax(x: Tensor, group: Group | None) -> Tensor:
    """Overwrite logits with log-probabilities, and return them."""
    peak = x.amax(dim=1)
    x.sub_((peak if group is None else all_reduce(peak, "max", group))[:, None])
    return x.sub_(_sum(x.exp(), group).log_()[:, None])


def _picked(log_probs: Tensor, targets: Tensor, group: Group | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of the targets, their columns among this rank's, [n, 1], and whether they
    are here."""
    width = log_probs.shape[1]
    own = targets if group is None else targets - group.rank * width
    here = (targets >= 0) & (own >= 0) & (own < width)
    columns = own.clamp(0, width - 1)[:, None]
    found = log_probs.gather(1, columns)[:, 0].masked_fill(~here, 0.0)
    return (found if group is None else all_reduce(found, "sum", group)), columns, here


def _sum(x: Tensor, group: Group | None) -> Tensor:
    total = x.sum(dim=1)
    return total if group is None else all_reduce(total, "sum", group)
