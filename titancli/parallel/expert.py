"""Expert parallel: each rank has some of a layer's experts, and tokens travel to the ranks that have theirs.

The parameters become DTensors cut along the experts, which FSDP2 then cuts further over the ranks that are
left. `Experts.over_experts` gets a dispatch around it: an all-to-all of counts, one of tokens, the products,
and an all-to-all back. Source: GShard (arXiv 2006.16668), dropless as in MegaBlocks (arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titancli.distributed.collectives import Group, all_to_all
from titancli.errors import TitanError
from titancli.models.blocks.moe import Experts, Rearrange


def expert_parallel(experts: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    """Spread every layer's experts over the ranks of a 1-D mesh; in place, on meta.

    Raises:
        TitanError: the ranks cannot have equally many of them.
    """
    group = Group.of(mesh.get_group())
    for name, layer in experts.items():
        if not isinstance(layer, Experts):
            raise TitanError(f"{name} ({type(layer).__name__}) is not a titancli.models.blocks.moe.Experts")
        if layer.num_experts % group.size:
            raise TitanError(
                f"{name}: {layer.num_experts} experts cannot be distributed over {group.size} ranks"
            )
        for key, parameter in list(layer.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(layer, key, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        layer.over_experts = partial(_dispatched, layer, group)  # type: ignore[method-assign]


def _dispatched(layer: Experts, group: Group, x: Tensor, counts: Tensor) -> Tensor:
    """`Experts.over_experts` where each rank has its own tokens and its own experts."""
    # As attributes: see `Experts.over_experts`.
    weights = {key: _local(getattr(layer, key)) for key in layer._parameters}
    received, to_ranks, from_ranks = _exchange_counts(layer, group, x, counts)
    visitors = all_to_all(x, group, from_ranks, to_ranks)
    # They lie rank by rank, and within a rank's expert by expert; the products want it the other way round.
    order, place = _by_expert(received, sum(from_ranks))
    visitors = Rearrange.apply(visitors, order, place, 1)
    out = layer.compute(visitors, received.sum(0), weights)
    return all_to_all(Rearrange.apply(out, place, order, 1), group, to_ranks, from_ranks)


def _exchange_counts(
    layer: Experts, group: Group, x: Tensor, counts: Tensor
) -> tuple[Tensor, list[int], list[int]]:
    """Exchange the numbers of tokens that travel between the ranks.

    Returns:
        What this rank gets from each rank for each of its experts, [ranks, experts / ranks]; how many it
        sends to each rank; and how many it gets from each.
    """
    if layer.force_load_balance:  # known without a look at the device, the same on every rank
        dealt = [(len(x) - expert - 1) // layer.num_experts + 1 for expert in range(layer.num_experts)]
        share = layer.num_experts // group.size
        to_ranks = [sum(dealt[rank * share : (rank + 1) * share]) for rank in range(group.size)]
        mine = dealt[group.rank * share : (group.rank + 1) * share]
        received = torch.tensor(mine, device=x.device).expand(group.size, -1)
        return received, to_ranks, [sum(mine)] * group.size
    received = all_to_all(counts, group).view(group.size, -1)
    sizes = torch.stack((counts.view(group.size, -1).sum(1), received.sum(1)))
    to_ranks, from_ranks = sizes.tolist()  # the one reading to the host: sizes of memory follow from it
    return received, to_ranks, from_ranks


def _by_expert(received: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The order that brings rows from rank-major to expert-major, and its inverse."""
    ranks, experts = received.shape
    labels = torch.arange(experts, device=received.device).repeat(ranks)
    order = labels.repeat_interleave(received.flatten(), output_size=total).argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(total, device=order.device))
    return order, place


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
