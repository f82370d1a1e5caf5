"""Tensors that several ranks load alike: one rank reads each from the disk, and sends it to the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

WORTH = 1 << 16
"""Minimum size in bytes for which sending is faster than reading."""


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same part of a tensor."""

    group: dist.ProcessGroup
    reader: int
    """The rank that reads it."""

    @property
    def mine(self) -> bool:
        return self.reader == dist.get_rank()

    @torch.no_grad()
    def give(self, tensor: Tensor) -> None:
        """Copy the reader's part to the others; collective over the replicas."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        sent = local.detach().contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), src=self.reader, group=self.group)
        if not self.mine and sent.data_ptr() != local.data_ptr():
            local.copy_(sent)


def shared_among_replicas(tensors: Mapping[str, Tensor], alike: Sequence[str]) -> dict[str, Replicas]:
    """Choose which rank reads each tensor, in the order of sending; equal on all replicas of a tensor.

    Args:
        alike: for each rank, a checksum of the names, shapes and dtypes that it loads. Ranks that load
            different tensors each read their own.
    """
    shared: dict[str, Replicas] = {}
    # Separately for each group: its ranks do not all know what they read for others in groups across it.
    load: dict[tuple[int, ...], Counter[int]] = {}
    for name, tensor in sorted(tensors.items()):
        if not isinstance(tensor, DTensor) or (group := _replicas_of(tensor)) is None:
            continue
        ranks = tuple(dist.get_process_group_ranks(group))
        if len({alike[rank] for rank in ranks}) > 1:
            continue
        given = load.setdefault(ranks, Counter())
        reader = min(ranks, key=lambda rank: (given[rank], rank))
        given[reader] += share(tensor)
        shared[name] = Replicas(group, reader)
    return shared


def _replicas_of(tensor: DTensor) -> dist.ProcessGroup | None:
    """Return the largest group along one mesh dimension whose ranks hold the same part of a tensor."""
    if share(tensor) < WORTH or not dist.is_initialized():
        return None
    mesh = tensor.device_mesh
    dims = [
        dim
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(dim) > 1
    ]
    if not dims or mesh.get_coordinate() is None:
        return None
    return mesh.get_group(max(dims, key=lambda dim: (mesh.size(dim), -dim)))


def share(tensor: DTensor) -> int:
    """Return the bytes of a rank's part of a tensor; equal on all ranks, of which some may have less."""
    mesh, placements = tensor.device_mesh, tensor.placements
    ranks = math.prod(
        mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()
    )
    return -(-math.prod(tensor.shape) * tensor.dtype.itemsize // ranks)
