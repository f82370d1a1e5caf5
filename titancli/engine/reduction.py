"""Numbers of all data-parallel ranks as one: on the device, and nothing is read to the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def marked(sums: dict[str, Tensor], poison: Tensor | None) -> dict[str, Tensor]:
    """The numbers, NaN where what they are made of is (`poison`, see `given.checked_batches`)."""
    return sums if poison is None else {name: value + poison for name, value in sums.items()}


def summed(sums: dict[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Scalars of the same names, in the same order on every rank, added up by name. Collective."""
    total = torch.stack(list(sums.values()))
    dist.all_reduce(total, group=group)
    return dict(zip(sums, total.unbind(), strict=True))


def largest(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The largest of the ranks' scalars; NaN where one of them is. Collective."""
    # A maximum over NaN is whatever comes first.
    both = torch.stack((value.isnan().float(), value.nan_to_num(-torch.inf, torch.inf, -torch.inf)))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return torch.where(both[0] > 0, torch.full_like(both[1], torch.nan), both[1])


def quotient(total: Tensor, weight: Tensor) -> Tensor:
    """total / weight, and 0 where nothing was weighed; NaN where the weight is."""
    return torch.where(weight <= 0, torch.zeros_like(total), total / weight)
