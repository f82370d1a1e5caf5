"""How a matrix is cut over ranks, as steps that can be undone one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True)
class Cut:
    """One dimension of the mesh cuts what the cuts before it have left."""

    ranks: dist.ProcessGroup
    """They hold the pieces, in their order."""
    dim: int
    """Of the matrix: −2 its rows are cut, −1 its columns."""
    sizes: list[int]
    """Of each rank's piece along `dim`."""


def cuts_of(parameter: Tensor) -> list[Cut] | None:
    """What has cut a matrix, or each of a stack [experts, rows, columns], the last cut first.

    A cut between the experts of a stack leaves each of them whole, and is none. None: it is cut in a way that
    this cannot tell, and its parts are no rows and columns of one another.
    """
    if not isinstance(parameter, DTensor):
        return []
    mesh, placements = parameter.device_mesh, parameter.placements
    if any(placement.is_partial() for placement in placements):
        return None
    cuts: list[Cut] = []
    for dim in (-2, -1):
        axes = [axis for axis, place in enumerate(placements) if _dim(place) == parameter.ndim + dim]
        if not _in_known_order(parameter, axes):
            return None
        length = parameter.shape[dim]
        # FSDP2 stands to the left of tensor parallelism, and cuts what that has left.
        for axis in reversed(axes):
            count = mesh.size(axis)
            sizes = [_piece(rank, length, count) for rank in range(count)]
            length = sizes[mesh.get_local_rank(axis)]
            if count > 1:
                cuts.append(Cut(mesh.get_group(axis), dim, sizes))
    axis_of = {mesh.get_group(axis): axis for axis in range(mesh.ndim)}
    return sorted(cuts, key=lambda cut: axis_of[cut.ranks])


def _dim(placement: object) -> int | None:
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def _in_known_order(parameter: DTensor, axes: list[int]) -> bool:
    """Whether of the mesh's axes that cut one dimension each cuts what those to its right have left."""
    inner = 1
    for axis in reversed(axes):
        placement = parameter.placements[axis]
        stride = placement.split_factor if isinstance(placement, _StridedShard) else 1
        if stride != inner:
            return False
        inner *= parameter.device_mesh.size(axis)
    return True


def _piece(rank: int, length: int, ranks: int) -> int:
    """How much a rank holds: equal pieces, rounded up, so that the last ranks may hold less or nothing."""
    piece = -(-length // ranks)
    return max(0, min(piece, length - rank * piece))
