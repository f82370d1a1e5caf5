"""Reductions over data-parallel ranks, on the device; nothing is read to the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def nan_if_invalid(sums: dict[str, Tensor], poison: Tensor | None) -> dict[str, Tensor]:
    """Return the numbers, NaN if their batches are invalid (`poison`, see `inputs.checked_batches`)."""
    return sums if poison is None else {name: value + poison for name, value in sums.items()}


def summed(sums: dict[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Sum scalars over ranks by name; names and their order are the same on every rank. Collective."""
    if dist.get_world_size(group) == 1:
        return dict(sums)
    total = torch.stack(list(sums.values()))
    dist.all_reduce(total, group=group)
    return dict(zip(sums, total.unbind(), strict=True))


def largest(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the largest of the ranks' scalars; NaN if one of them is. Collective."""
    if dist.get_world_size(group) == 1:
        return value
    # A maximum over NaN depends on the order.
    both = torch.stack((value.isnan().float(), value.nan_to_num(-torch.inf, torch.inf, -torch.inf)))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return torch.where(both[0] > 0, torch.full_like(both[1], torch.nan), both[1])


def quotient(total: Tensor, weight: Tensor) -> Tensor:
    """Return total / weight; 0 if the weight is 0, NaN if it is NaN."""
    return torch.where(weight <= 0, torch.zeros_like(total), total / weight)
