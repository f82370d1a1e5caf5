"""Tensors that several ranks hold by columns: each reads some rows, then they exchange columns.

A checkpoint's checksums cover contiguous bytes, that is, whole rows: on its own each of these ranks would
have to read and hash all of them. In a Hugging Face folder the columns of two ranks may be interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from titancli.checkpoint.format import replicas
from titancli.checkpoint.format.layout import Box
from titancli.checkpoint.format.metadata import Metadata
from titancli.checkpoint.format.reader import Part
from titancli.distributed.private import boxes_of

_BLOCK = 1 << 23
"""Bytes of a rank's rows that are sent at a time."""


@dataclass(frozen=True)
class Columns:
    """The ranks that together hold some rows of a tensor, split along another dimension."""

    ranks: tuple[int, ...]
    """The ranks, in the order of their columns."""
    place: int
    """The position of this rank in `ranks`."""
    dim: int
    """The dimension that is split among the ranks."""
    box: Box
    """The box that they hold together: all columns of some rows."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Return the boundaries between the ranks' columns, including the first start and the last end."""
        return _bounds(self.box[1][self.dim], len(self.ranks))

    @property
    def rows(self) -> Box:
        """Return the box of rows that this rank reads."""
        (offset, *others), (count, *sizes) = self.box
        low, high = _bounds(count, len(self.ranks))[self.place : self.place + 2]
        return (offset + low, *others), (high - low, *sizes)

    def part(self, name: str, tensor: Tensor) -> Part:
        """Return the part that this rank reads; its memory is on the meta device."""
        return Part(name, self.rows, torch.empty(self.rows[1], dtype=tensor.dtype, device="meta"))

    @torch.no_grad()
    def exchange(
        self,
        rows: Callable[[int, int], Tensor],
        dtype: torch.dtype,
        tensor: Tensor,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Send each rank its columns of these rows, and write the received columns into this rank's part of
        the tensor; collective over the ranks.

        Args:
            rows: returns rows [low, high) of those that this rank reads, on the CPU; it must not raise,
                since the other ranks are waiting.
            dtype: the dtype of the rows, in which they are sent.
            group: a gloo group of all ranks.
        """
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        columns, places = self.bounds, _bounds(self.box[1][0], len(self.ranks))
        own = places[self.place + 1] - places[self.place]
        step = max(1, _BLOCK // (math.prod(self.box[1][1:]) * dtype.itemsize))
        for start in range(0, places[1], step):
            some = rows(min(start, own), min(start + step, own))
            works: list[Any] = []
            came: list[tuple[Tensor, Tensor]] = []
            for number, rank in enumerate(self.ranks):
                width = columns[number + 1] - columns[number]
                sent = some.narrow(self.dim, columns[number], width)
                theirs = local[places[number] : places[number + 1]][start : start + step]
                if number == self.place:
                    theirs.copy_(sent)
                    continue
                if sent.numel():
                    works.append(dist.isend(_flat(sent.contiguous()), rank, group=group))
                if theirs.numel():
                    came.append((theirs, torch.empty(theirs.shape, dtype=dtype)))
                    works.append(dist.irecv(_flat(came[-1][1]), rank, group=group))
            for work in works:
                work.wait()
            for target, values in came:
                target.copy_(values)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _bounds(size: int, count: int) -> tuple[int, ...]:
    """Return the boundaries of the parts into which DTensor splits a dimension."""
    each = -(-size // count)
    return tuple(min(number * each, size) for number in range(count + 1))


def shared_by_columns(
    tensors: Mapping[str, Tensor], alike: Sequence[str], metadata: Metadata
) -> dict[str, Columns]:
    """Return the tensors whose rows are shared; equal on all ranks that hold parts of the same tensor.

    Args:
        alike: for each rank, a checksum of the names, shapes and dtypes that it loads.

    Raises:
        EnvironmentProblem: the metadata is malformed.
    """
    shared = {}
    for name, tensor in tensors.items():
        columns = columns_of(tensor, alike)
        # Pieces that were stored by one rank each are read faster without an exchange.
        if columns is not None and metadata.crosses(name, columns.dim, columns.bounds[1:-1]):
            shared[name] = columns
    return shared


def columns_of(tensor: Tensor, alike: Sequence[str]) -> Columns | None:
    """Return the ranks that hold the other columns of a tensor; None: it is split in another way, or too
    small.

    Args:
        alike: for each rank, a value that is equal on ranks that load the same tensors.
    """
    if not isinstance(tensor, DTensor) or replicas.share(tensor) < replicas.WORTH:
        return None
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    divided = [
        (number, placement)
        for number, placement in enumerate(tensor.placements)
        if mesh.size(number) > 1 and not placement.is_replicate()
    ]
    if not divided or coordinate is None or len({alike[rank] for rank in mesh.mesh.flatten().tolist()}) > 1:
        return None
    *outer, (number, last) = divided
    if type(last) is not Shard or last.dim == 0:
        return None
    if any(type(placement) is not Shard or placement.dim != 0 for _, placement in outer):
        return None
    place: list[Any] = list(coordinate)
    place[number] = slice(None)
    ranks = tuple(mesh.mesh[tuple(place)].tolist())
    ((offsets, sizes),) = boxes_of(tensor)
    box = (offsets[0], *[0] * (tensor.ndim - 1)), (sizes[0], *tensor.shape[1:])
    columns = Columns(ranks, coordinate[number], last.dim, box)
    # At least one row and one column for each rank.
    return columns if sizes[0] >= len(ranks) and columns.bounds[-2] < columns.bounds[-1] else None
