"""How a matrix is sharded over ranks, as cuts that can be undone one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True)
class Cut:
    """A cut by one mesh dimension of the shards left by the cuts before."""

    ranks: dist.ProcessGroup
    """Ranks that hold the pieces, in order."""
    dim: int
    """Dimension of the matrix: −2 for rows, −1 for columns."""
    sizes: list[int]
    """Size of each rank's piece along `dim`."""


def cuts_of(parameter: Tensor) -> list[Cut] | None:
    """Return the cuts of a matrix, or of each in a stack [experts, rows, columns], the last cut first.

    Sharding a stack by experts leaves each matrix whole, and is not a cut. None: the sharding is not
    understood, and shards are not blocks of rows and columns.
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
        # FSDP2 is left of tensor parallelism in the mesh, and cuts the shards of that.
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
    """Return whether, of the mesh dimensions that cut one dimension, each cuts the shards of those to its
    right."""
    inner = 1
    for axis in reversed(axes):
        placement = parameter.placements[axis]
        stride = placement.split_factor if isinstance(placement, _StridedShard) else 1
        if stride != inner:
            return False
        inner *= parameter.device_mesh.size(axis)
    return True


def _piece(rank: int, length: int, ranks: int) -> int:
    """Return the size of a rank's piece: equal pieces, rounded up, so that the last ranks may have less or
    nothing."""
    piece = -(-length // ranks)
    return max(0, min(piece, length - rank * piece))
