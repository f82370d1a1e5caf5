"""Expert parallel: each rank has some of a layer's experts, and tokens travel to the ranks that have theirs.

The parameters become DTensors cut along the experts, which FSDP2 then cuts further over the ranks that are
left. `AllToAll` sends tokens by an all-to-all of counts, one of tokens, and, after the products, one back.
Source: GShard (arXiv 2006.16668), dropless as in MegaBlocks (arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from titancli.distributed.collectives import Group, all_to_all
from titancli.errors import TitanError
from titancli.models.blocks.moe import Experts, Rearrange, by_expert
from titancli.protocols.dispatch import Dispatcher, Visit


def expert_parallel(experts: Mapping[str, nn.Module], mesh: DeviceMesh, dispatcher: Dispatcher) -> None:
    """Spread every layer's experts over the ranks of a 1-D mesh; in place, on meta.

    Raises:
        TitanError: the ranks cannot have equally many of them.
    """
    for name, layer in experts.items():
        if not isinstance(layer, Experts):
            raise TitanError(f"{name} ({type(layer).__name__}) is not a titancli.models.blocks.moe.Experts")
        if layer.num_experts % mesh.size():
            raise TitanError(
                f"{name}: {layer.num_experts} experts cannot be distributed over {mesh.size()} ranks"
            )
        for key, parameter in list(layer.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(layer, key, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        layer.dispatcher = dispatcher


class AllToAll:
    """Sends each visit as a row of its own, to whichever rank has its expert."""

    def __init__(self, config: Any, *, group: dist.ProcessGroup, **_: Any) -> None:
        self._group = Group.of(group)

    def __call__(self, visit: Visit, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """See `titancli.protocols.Dispatcher`."""
        return by_expert(visit, partial(self._elsewhere, compute, visit.dealt))

    def _elsewhere(
        self, compute: Callable[[Tensor, Tensor], Tensor], dealt: bool, x: Tensor, counts: Tensor
    ) -> Tensor:
        received, to_ranks, from_ranks = self._exchange_counts(len(x), counts, dealt)
        visitors = all_to_all(x, self._group, from_ranks, to_ranks)
        # They lie rank by rank, and within a rank's expert by expert; the products want it the other way
        # round.
        order, place = _by_expert(received, sum(from_ranks))
        out = compute(Rearrange.apply(visitors, order, place, 1), received.sum(0))
        return all_to_all(Rearrange.apply(out, place, order, 1), self._group, to_ranks, from_ranks)

    def _exchange_counts(
        self, visits: int, counts: Tensor, dealt: bool
    ) -> tuple[Tensor, list[int], list[int]]:
        """Exchange the numbers of visits between the ranks.

        Returns:
            What this rank gets from each rank for each of its experts, [ranks, experts / ranks]; how many it
            sends to each rank; and how many it gets from each.
        """
        group, experts = self._group, len(counts)
        if dealt:  # known without a look at the device, the same on every rank
            of_each = [(visits - expert - 1) // experts + 1 for expert in range(experts)]
            share = experts // group.size
            to_ranks = [sum(of_each[rank * share : (rank + 1) * share]) for rank in range(group.size)]
            mine = of_each[group.rank * share : (group.rank + 1) * share]
            received = torch.tensor(mine, device=counts.device).expand(group.size, -1)
            return received, to_ranks, [sum(mine)] * group.size
        received = all_to_all(counts, group).view(group.size, -1)
        sizes = torch.stack((counts.view(group.size, -1).sum(1), received.sum(1)))
        to_ranks, from_ranks = sizes.tolist()  # the one reading to the host: sizes of memory follow from it
        return received, to_ranks, from_ranks


def _by_expert(received: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the order that brings rows from rank-major to expert-major, and its inverse."""
    ranks, experts = received.shape
    labels = torch.arange(experts, device=received.device).repeat(ranks)
    order = labels.repeat_interleave(received.flatten(), output_size=total).argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(total, device=order.device))
    return order, place
