"""Host memory that a rank's part of a checkpoint is copied to, and written from while training continues."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from titancli.checkpoint.format.storage import Pieces

SLAB = 1 << 32
"""Bytes that are allocated at a time. All slabs are powers of two, to which torch rounds pinned memory up."""
ALIGNED = 64
"""Alignment of a piece in a slab, in bytes."""

Layout = dict[Any, tuple[torch.Size, torch.dtype]]
"""The shape and dtype of each piece, by its index."""


class Staging:
    """Buffers for this rank's pieces: views of a few slabs, which are allocated once and used again."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._layout: Layout = {}
        self._buffers: Future[dict[Any, Tensor]] | None = None

    def reserve(self, pieces: Pieces) -> None:
        """Start to allocate buffers for these pieces in a thread: pinning takes a second for a few GiB.
        `copy` raises its failures."""
        self._reserve({item.index: pieces.resolve(item) for item in pieces.items})

    @torch.no_grad()
    def copy(self, pieces: Pieces) -> Pieces:
        """Return the same pieces with a copy of the data, complete when this returns.

        Raises:
            RuntimeError: there is not enough memory.
        """
        values = {item.index: pieces.resolve(item) for item in pieces.items}
        coming = self._reserve(values)
        try:
            buffers = coming.result()
        except BaseException:
            self._buffers = None  # the next copy tries again
            raise
        for index, value in values.items():
            buffers[index].copy_(value, non_blocking=self._pinned and value.is_cuda)
        if self._pinned:
            for device in {value.device for value in values.values() if value.is_cuda}:
                torch.cuda.current_stream(device).synchronize()

        def staged(item: WriteItem) -> Tensor:
            return buffers[item.index]

        return Pieces(pieces.items, staged)

    def _reserve(self, values: Mapping[Any, Tensor]) -> Future[dict[Any, Tensor]]:
        layout = {index: (value.shape, value.dtype) for index, value in values.items()}
        if self._buffers is None or layout != self._layout:
            pinned = self._pinned and any(value.is_cuda for value in values.values())
            self._layout, self._buffers = layout, None  # frees the old ones first
            thread = ThreadPoolExecutor(1, thread_name_prefix="titan-staging")
            self._buffers = thread.submit(buffers_of, layout, pinned)
            thread.shutdown(wait=False)
        return self._buffers


def buffers_of(layout: Layout, pinned: bool) -> dict[Any, Tensor]:
    """Return an uninitialised tensor for each piece, within as few slabs as hold them."""
    sizes = {index: _up(math.prod(shape) * dtype.itemsize) for index, (shape, dtype) in layout.items()}
    left, slabs, used = sum(sizes.values()), list[Tensor](), list[int]()
    buffers: dict[Any, Tensor] = {}
    for index in sorted(sizes, key=sizes.__getitem__, reverse=True):
        size, (shape, dtype) = sizes[index], layout[index]
        at = next((n for n, slab in enumerate(slabs) if used[n] + size <= len(slab)), None)
        if at is None:
            at = len(slabs)
            whole = max(_power(size, math.ceil), _power(min(left, SLAB), math.floor))
            slabs.append(slab_of(whole, pinned))
            used.append(0)
        part = slabs[at][used[at] : used[at] + math.prod(shape) * dtype.itemsize]
        buffers[index] = part.view(dtype).view(shape)
        used[at] += size
        left -= size
    return buffers


def slab_of(size: int, pinned: bool) -> Tensor:
    """Return `size` bytes of host memory, [size] uint8."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _power(size: int, rounded: Any) -> int:
    """Return the nearest power of two below or above a size."""
    return 1 << int(rounded(math.log2(max(size, 1))))
