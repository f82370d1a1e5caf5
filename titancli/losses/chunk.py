"""The computations of the chunked losses on the logits of one chunk: plain functions, which may be compiled.

In place wherever a chunk's logits are still needed for something else: they are the largest tensor there is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from titancli.distributed.collectives import Group, all_reduce


def token_loss(
    logits: Tensor, targets: Tensor, token_weights: Tensor, group: Group | None, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities of the targets, [rows] fp32, and overwrite the logits with the gradient of
    −Σ w·log p by them, except in the targets' columns, whose values are returned for `put`.

    So compiled code reads the logits, and writes the gradient in their place, with the casts in the same
    passes: what is scattered would have to lie in memory first.

    Args:
        logits: [rows, V].
        targets: [rows] int64; negative is no target.
        token_weights: [rows] fp32; not read where there is no target.
        group: the ranks that the vocabulary is cut over.
    """
    given, logits = logits, logits.float()
    picks = _Picks(targets, logits.shape[1], group)
    picked = picks.of(logits)
    peak = _over(group, "max", logits.amax(dim=1))
    exponentials = logits.sub_(peak[:, None]).exp_()
    total = _over(group, "sum", exponentials.sum(dim=1))
    own = picked.sub_(peak)
    log_probs = (own - total.log()).masked_fill_(picks.none, 0.0)
    if not wants_gradient:
        return log_probs, None
    # d(−w·log p)/d logits = w · (softmax − one-hot)
    token_weights = token_weights.masked_fill(picks.none, 0.0)
    factor = token_weights / total
    softmax = exponentials.mul_(factor[:, None])
    if given is not logits:
        given.copy_(softmax)
    return log_probs, own.exp_().mul_(factor).sub_(token_weights)


def log_probs(
    logits: Tensor, targets: Tensor, group: Group | None, wants_entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, the log-sum-exp of every row, and where it is wanted (else empty) the
    entropy of every row that has a target, 0 elsewhere; each [rows] fp32. Entropy takes a second tensor of
    the logits' size."""
    logits = logits.float()
    picks = _Picks(targets, logits.shape[1], group)
    picked = picks.of(logits)
    peak = _over(group, "max", logits.amax(dim=1))
    shifted = logits.sub_(peak[:, None])
    exponentials = shifted.exp() if wants_entropy else shifted.exp_()
    total = _over(group, "sum", exponentials.sum(dim=1))
    entropy = total.new_empty(0)
    if wants_entropy:
        # With p = e^x / total:  −Σ p·log p = log total − Σ e^x·x / total
        spread = _over(group, "sum", exponentials.mul_(shifted).sum(dim=1))
        entropy = (total.log() - spread / total).masked_fill_(picks.none, 0.0)
    normalisers = total.log_().add_(peak)
    return (picked - normalisers).masked_fill_(picks.none, 0.0), normalisers, entropy


def log_probs_gradient(
    logits: Tensor,
    normalisers: Tensor,
    targets: Tensor,
    grad: Tensor,
    group: Group | None,
    entropy: Tensor | None = None,
    entropy_grad: Tensor | None = None,
) -> Tensor:
    """Overwrite the logits, [rows, V], with the gradient by them that follows from `grad`, that of the
    log-probabilities, except in the targets' columns, whose values are returned for `put`.

    With `entropy_grad`, [rows] fp32 and 0 where there is no target, the gradient of `entropy` is added; it
    takes a second tensor of the logits' size.
    """
    given, logits = logits, logits.float()
    own = _Picks(targets, logits.shape[1], group).here(logits).sub_(normalisers)
    log_softmax = logits.sub_(normalisers[:, None])
    if entropy is None or entropy_grad is None:
        # d(log p)/d logits = one-hot − softmax
        softmax = log_softmax.exp_().mul_(-grad[:, None])
        if given is not logits:
            given.copy_(softmax)
        return grad - own.exp_().mul_(grad)
    # dH/d logits = −softmax · (log softmax + H)
    softmax = log_softmax.exp()
    factor = log_softmax.add_(entropy[:, None]).mul_(-entropy_grad[:, None]).sub_(grad[:, None])
    given.copy_(softmax.mul_(factor))
    return grad - own.exp().mul_((own + entropy).mul_(entropy_grad).add_(grad))


def put(logits: Tensor, targets: Tensor, values: Tensor, group: Group | None) -> Tensor:
    """Write `values`, [rows] fp32, to those of the targets' columns that are here, and return the logits."""
    picks = _Picks(targets, logits.shape[1], group)
    values = torch.where(picks.elsewhere, picks.here(logits), values.to(logits.dtype))
    return logits.scatter_(1, picks.columns, values[:, None])


@lru_cache
def compiled(function: Callable, backend: str | None) -> Callable:
    """Return the function, compiled once for a backend; None leaves it as it is."""
    return function if backend is None else torch.compile(function, backend=backend, fullgraph=True)


class _Picks:
    """The targets' columns among this rank's part of the vocabulary."""

    def __init__(self, targets: Tensor, columns: int, group: Group | None) -> None:
        self.group = group
        self.none = targets < 0
        own = targets if group is None else targets - group.rank * columns
        self.elsewhere = (own < 0) | (own >= columns)
        """No target, or another rank's."""
        self.columns = own.clamp(0, columns - 1)[:, None]

    def of(self, logits: Tensor) -> Tensor:
        """Return the targets' logits; anything for rows without a target."""
        found = self.here(logits)
        if self.group is None:
            return found
        return _over(self.group, "sum", found.masked_fill_(self.elsewhere, 0.0))

    def here(self, logits: Tensor) -> Tensor:
        """Return the values in the targets' columns; for a target on another rank, of some column."""
        return logits.gather(1, self.columns)[:, 0]


def _over(group: Group | None, op: str, x: Tensor) -> Tensor:
    """x over the ranks of the group: its sum or its maximum."""
    return x if group is None else all_reduce(x, op, group)
