"""Dispatchers: how tokens reach the experts of other ranks under mesh.ep."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor


class Visit(NamedTuple):
    """N tokens of this rank, and the experts that they visit."""

    tokens: Tensor
    """[N, dim]."""
    experts: Tensor
    """[N, top_k] int64, out of all E experts of the layer."""
    weights: Tensor
    """[N, top_k]: factors of the experts' outputs."""
    counts: Tensor
    """[E] int64: visits of each expert."""
    weigh_first: bool = False
    """Whether the weights are factors of the experts' inputs instead."""
    dealt: bool = False
    """Whether the experts are visited in turn, so that `counts` is known without reading it."""


class Dispatcher(Protocol):
    def __call__(self, visit: Visit, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the weighted sum of each token's experts, [N, dim], with gradients of tokens and weights.
        Called on every rank of the group alike, also where it has no visits, and where blocks recompute.

        Args:
            compute: `compute(x, counts)` applies this rank's E / ranks experts to x [M, dim], all visits of
                its first expert, then of its second, …; `counts` [E / ranks] int64 are those of each. Returns
                [M, dim].
        """
        ...


class DispatcherBuilder(Protocol):
    def __call__(
        self, config: Any, *, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
    ) -> Dispatcher:
        """Build the dispatcher of all layers, on each rank of the group that the experts are spread over."""
        ...
