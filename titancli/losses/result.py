"""What a loss returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class LossResult(NamedTuple):
    """A sum and its weight: the engine divides once, by the total weight over all ranks and micro-batches.

    A NamedTuple because FSDP2 looks for the tensors of a module's output through the pytree.
    """

    sum: Tensor
    """Scalar, fp32, with gradient: the loss *summed* over whatever `weight` counts."""
    weight: Tensor
    """Scalar, fp32, without gradient: tokens, pairs, sequences, …"""
    metrics: dict[str, Tensor] = {}  # noqa: RUF012 - never written to
    """Further scalars to report, as sums over the same weight."""
