"""Reading what a rank needs directly into its tensors: each byte once, hashed as it is read."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titancli.checkpoint.format.files import read_into
from titancli.checkpoint.format.hashed import Digest, checksum
from titancli.checkpoint.format.layout import Box, Chunk, TensorLayout, common
from titancli.checkpoint.format.manifest import DamagedCheckpoint
from titancli.checkpoint.format.region import runs
from titancli.checkpoint.format.tensorfile import ITEM_SIZE, Entry
from titancli.checkpoint.format.tensors import TORCH_DTYPE
from titancli.distributed.private import boxes_of
from titancli.errors import TitanError

_BLOCK = 1 << 23
"""Bytes that a thread reads and hashes at a time."""
_ROOM = 1 << 25
"""Bytes of the buffer for tensors that cannot be read into directly."""
_THREADS = 4


class Part(NamedTuple):
    """Part of a tensor, and the memory that its values go to."""

    name: str
    box: Box
    memory: Tensor
    """Memory of the box's sizes, on any device, of any dtype."""


def parts_of(tensors: Mapping[str, Tensor]) -> list[Part]:
    """Return the parts that this rank holds of tensors.

    Raises:
        TitanError: a part is not one box.
    """
    parts = []
    for name, tensor in tensors.items():
        memory = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for box in boxes_of(tensor):
            if not memory.numel():
                continue
            if tuple(memory.shape) != box[1]:
                raise TitanError(f"what a rank has of {name}, {list(memory.shape)}, is not one part of it")
            parts.append(Part(name, box, memory.detach()))
    return parts


class Reader:
    """Reads what a rank needs of a checkpoint, and verifies the checksums of what it reads.

    Checksums cover pieces of a tensor, so whole pieces are read.

    Raises:
        EnvironmentProblem: a file is damaged, or cannot be read; the tensors then hold some of its values.
    """

    def __init__(
        self, folder: Path, layouts: Mapping[str, TensorLayout], digests: Mapping[str, Digest] | None
    ) -> None:
        """Create the reader.

        Args:
            digests: the digests of the data files, by name; None: no checksums are verified.
        """
        self._folder, self._layouts, self._digests = folder, layouts, digests
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def fill(self, parts: Iterable[Part]) -> None:
        """Fill parts of tensors, however the checkpoint has divided them."""
        with self._threads() as pool:
            for work in sorted(self._work(parts), key=lambda work: (work.chunk.file, work.entry.start)):
                self._read(work, pool)

    def ranges(self, parts: Iterable[Part]) -> Iterator[tuple[str, int, int]]:
        """Yield the bytes that `fill` will read, as (file, start, end)."""
        for work in self._work(parts):
            for block in work.blocks():
                for low, high in block.spans():
                    yield work.chunk.file, work.entry.start + low, work.entry.start + high

    def _work(self, parts: Iterable[Part]) -> Iterator[_Work]:
        for name, (offsets, sizes), memory in parts:
            layout = self._layouts[name]
            for chunk in layout.chunks:
                if (inside := common(offsets, sizes, (chunk.offsets, chunk.shape))) is None:
                    continue
                target = memory
                for dim, (start, length) in enumerate(zip(*inside, strict=True)):
                    target = target.narrow(dim, start + chunk.offsets[dim] - offsets[dim], length)
                entry = Entry(chunk.key, layout.dtype, chunk.shape, chunk.start)
                yield _Work(chunk, entry, inside[0], target)

    def check_headers(self, headers: Mapping[str, Digest]) -> None:
        """Verify the headers of data files."""
        for file, header in headers.items():
            memory = memoryview(bytearray(header.size))
            read_into(self._folder / file, 0, memory)
            if checksum(memory) != header.xxh3_64:
                raise self._damaged(file)

    @contextmanager
    def _threads(self) -> Iterator[_Pool]:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="titan-read") as threads:
            pool = _Pool(threads)
            try:
                yield pool
                pool.settle()
            finally:
                threads.shutdown(cancel_futures=True)

    def _read(self, work: _Work, pool: _Pool) -> None:
        entry, target = work.entry, work.target
        if _takes(target, entry):
            self._read_pieces(work, 0, entry.nbytes, target.reshape(-1).view(torch.uint8), pool)
            return
        for block in work.blocks():
            spans = block.spans()
            begin, end = spans[0][0], spans[-1][1]
            if self._scratch.numel() < end - begin:
                self._scratch = torch.empty(end - begin, dtype=torch.uint8)
            for low, high in spans:
                self._read_pieces(work, low, high, self._scratch[low - begin : high - begin], pool)
            pool.settle()
            values = self._scratch[: end - begin].view(TORCH_DTYPE[entry.dtype])
            first = block.first - begin // ITEM_SIZE[entry.dtype]
            block.target.copy_(values.as_strided(block.target.shape, block.strides, first))

    def _read_pieces(self, work: _Work, low: int, high: int, memory: Tensor, pool: _Pool) -> None:
        """Queue reads of a chunk's bytes, from a piece boundary to another, with their hashes."""
        chunk, start = work.chunk, work.entry.start
        view = memory.numpy().data
        step = max(1, _BLOCK // chunk.piece) * chunk.piece
        for place in range(low, high, step):
            part = view[place - low : min(place + step, high) - low]
            pool.submit(self._read_block, chunk, start + place, place // chunk.piece, part)

    def _read_block(self, chunk: Chunk, position: int, number: int, memory: memoryview) -> None:
        read_into(self._folder / chunk.file, position, memory)
        if self._digests is None:
            return
        for place, expected in enumerate(chunk.checksums[number:]):
            piece = memory[place * chunk.piece : (place + 1) * chunk.piece]
            if not piece:
                return
            if checksum(piece) != expected:
                raise self._damaged(chunk.file)

    def _damaged(self, file: str) -> DamagedCheckpoint:
        why = f"{file} is damaged: its checksum does not match, as {socket.gethostname()} reads it"
        return DamagedCheckpoint(self._folder, why, file)


class _Work(NamedTuple):
    """A needed box of a chunk."""

    chunk: Chunk
    entry: Entry
    start: tuple[int, ...]
    """The index of its first element in the chunk."""
    target: Tensor
    """The memory that it goes to; of the same sizes."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the strides of the chunk, in elements."""
        return tuple(math.prod(self.entry.shape[dim + 1 :]) for dim in range(len(self.start)))

    @property
    def first(self) -> int:
        """Return the row-major index of its first element in the chunk."""
        return sum(start * stride for start, stride in zip(self.start, self.strides, strict=True))

    def blocks(self) -> Iterator[_Work]:
        """Divide it so that each block spans less than `_ROOM` bytes of the file, and ends at the end of a
        piece where possible."""
        item, sizes, strides = ITEM_SIZE[self.entry.dtype], self.target.shape, self.strides
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        several = [dim for dim, size in enumerate(sizes) if size > 1]
        if (last + 1) * item <= _ROOM or not several:
            yield self
            return
        dim = several[0]
        low, stop, row = self.start[dim], self.start[dim] + sizes[dim], strides[dim] * item
        even = self.chunk.piece // math.gcd(self.chunk.piece, row)
        while low < stop:
            high = min(stop, low + max(1, _ROOM // row))
            if high < stop and high - high % even > low:
                high -= high % even
            start = (*self.start[:dim], low, *self.start[dim + 1 :])
            target = self.target.narrow(dim, low - self.start[dim], high - low)
            yield from _Work(self.chunk, self.entry, start, target).blocks()
            low = high

    def spans(self) -> list[tuple[int, int]]:
        """Return the byte ranges of the chunk that contain its elements, in whole pieces."""
        item, piece = ITEM_SIZE[self.entry.dtype], self.chunk.piece
        region = [range(low, low + size) for low, size in zip(self.start, self.target.shape, strict=True)]
        starts, run = runs(region, self.entry.shape, item)
        lows, highs = starts // piece, -(-(starts + run) // piece)
        apart = np.flatnonzero(lows[1:] > highs[:-1]) + 1
        begins, ends = lows[np.r_[0, apart]], highs[np.r_[apart - 1, len(highs) - 1]]
        return [
            (int(low) * piece, min(int(high) * piece, self.entry.nbytes))
            for low, high in zip(begins, ends, strict=True)
        ]


class _Pool:
    """Work in progress in threads."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads, self._pending = threads, list[Future[None]]()

    def submit(self, function: object, *given: object) -> None:
        self._pending.append(self._threads.submit(function, *given))  # type: ignore[arg-type]

    def settle(self) -> None:
        """Wait for all of it, and raise the first failure."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.result()


def _takes(target: Tensor, entry: Entry) -> bool:
    """Return whether a tensor's memory equals the file's contents, byte for byte."""
    return (
        target.device.type == "cpu"
        and target.dtype == TORCH_DTYPE[entry.dtype]
        and tuple(target.shape) == entry.shape
        and target.is_contiguous()
    )
