"""Reading what a rank needs into the tensors that wait for it: each byte once, hashed on its way."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from titancli.checkpoint.format.files import read_into
from titancli.checkpoint.format.hashed import Digest, checksum, file_digest
from titancli.checkpoint.format.layout import Chunk, TensorLayout
from titancli.checkpoint.format.manifest import DamagedCheckpoint
from titancli.checkpoint.format.tensorfile import ITEM_SIZE, Entry
from titancli.checkpoint.format.tensors import TORCH_DTYPE, TensorFiles

_BLOCK = 1 << 24
"""Bytes that a thread reads and hashes at a time."""
_THREADS = 4


class Reader:
    """Reads what a rank needs of a checkpoint, and compares the checksums of what it reads.

    Those are of pieces of a tensor: what a rank needs is read in whole pieces. Where an earlier titan wrote
    no checksums of pieces, each file is hashed first, as a whole.

    Raises:
        EnvironmentProblem: a file is damaged, or cannot be read; the tensors then hold some of its values.
    """

    def __init__(
        self, folder: Path, layouts: Mapping[str, TensorLayout], digests: Mapping[str, Digest] | None
    ) -> None:
        """`digests`: of the data files, by name; None: no checksum is compared."""
        self._files, self._layouts, self._digests = TensorFiles(folder), layouts, digests
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._hashed: set[str] = set()

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place, whatever part of the checkpoint's they are."""
        planner, work = self._plan(tensors)
        with self._threads() as pool:
            for chunk, entry, items in sorted(work, key=lambda one: (one[0].file, one[1].start)):
                self._read_chunk(chunk, entry, items, planner, pool)

    def ranges(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int]]:
        """Yield the bytes that `fill` will read: a file, from, to."""
        for chunk, entry, items in self._plan(tensors)[1]:
            span = _Span.of(chunk, entry, items)
            yield chunk.file, entry.start + span.low, entry.start + span.high

    def _plan(self, tensors: Mapping[str, Tensor]) -> tuple[LoadPlanner, list[_Work]]:
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        metadata = Metadata({name: _dcp_metadata(self._layouts[name]) for name in tensors})
        planner.set_up_planner(dict(tensors), metadata, True)
        items: dict[tuple[str, int], list[ReadItem]] = {}
        for item in planner.create_local_plan().items:
            items.setdefault((item.storage_index.fqn, item.storage_index.index or 0), []).append(item)
        return planner, [(*self._place(self._layouts[name], n), found) for (name, n), found in items.items()]

    def check_headers(self, headers: Mapping[str, Digest]) -> None:
        """Compare what data files begin with."""
        for file, header in headers.items():
            memory = memoryview(bytearray(header.size))
            read_into(self._files.folder / file, 0, memory)
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

    def _place(self, layout: TensorLayout, number: int) -> tuple[Chunk, Entry]:
        """A chunk, and where it lies. Files without checksums of pieces are hashed here."""
        chunk = layout.chunks[number]
        if not chunk.checksums and self._digests is not None and chunk.file not in self._hashed:
            if file_digest(self._files.folder / chunk.file) != self._digests[chunk.file]:
                raise self._damaged(chunk.file)
            self._hashed.add(chunk.file)
        if chunk.start is not None:
            return chunk, Entry(chunk.key, layout.dtype, chunk.shape, chunk.start)
        return chunk, self._files.entry(chunk.file, chunk.key, layout.dtype, chunk.shape)

    def _read_chunk(
        self, chunk: Chunk, entry: Entry, items: list[ReadItem], planner: LoadPlanner, pool: _Pool
    ) -> None:
        target = planner.resolve_tensor(items[0]).detach()
        if len(items) == 1 and _takes(target, entry):
            self._read_rows(chunk, entry, 0, entry.nbytes, target.reshape(-1).view(torch.uint8), pool)
            planner.commit_tensor(items[0], target)
            return
        first, last, row, low, high = _Span.of(chunk, entry, items)
        if self._scratch.numel() < high - low:
            self._scratch = torch.empty(high - low, dtype=torch.uint8)
        memory = self._scratch[: high - low]
        self._read_rows(chunk, entry, low, high, memory, pool)
        pool.settle()
        rows = memory[first * row - low : last * row - low].view(TORCH_DTYPE[entry.dtype])
        value = rows.view(last - first, *entry.shape[1:]) if entry.shape else rows.view(())
        for item in items:
            _put(value, item, planner, first)

    def _read_rows(
        self, chunk: Chunk, entry: Entry, low: int, high: int, memory: Tensor, pool: _Pool
    ) -> None:
        """Have bytes of a chunk read, from the beginning of a piece to the end of one, and hashed."""
        view = memory.numpy().data
        step = max(1, _BLOCK // chunk.piece) * chunk.piece
        for start in range(low, high, step):
            part = view[start - low : min(start + step, high) - low]
            pool.submit(self._read_block, chunk, entry.start + start, start // chunk.piece, part)

    def _read_block(self, chunk: Chunk, position: int, number: int, memory: memoryview) -> None:
        read_into(self._files.folder / chunk.file, position, memory)
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
        return DamagedCheckpoint(self._files.folder, why, file)


_Work = tuple[Chunk, Entry, list[ReadItem]]
"""A chunk, where it lies, and what is needed of it."""


class _Span(NamedTuple):
    """The rows of a chunk that are needed, and the whole pieces that they lie in, in bytes."""

    first: int
    last: int
    row: int
    low: int
    high: int

    @classmethod
    def of(cls, chunk: Chunk, entry: Entry, items: Sequence[ReadItem]) -> _Span:
        first = min(item.storage_offsets[0] for item in items) if entry.shape else 0
        last = max(item.storage_offsets[0] + item.lengths[0] for item in items) if entry.shape else 1
        row = math.prod(entry.shape[1:]) * ITEM_SIZE[entry.dtype]
        low = first * row // chunk.piece * chunk.piece
        return cls(first, last, row, low, min(-(-last * row // chunk.piece) * chunk.piece, entry.nbytes))


class _Pool:
    """Work under way in threads."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads, self._pending = threads, list[Future[None]]()

    def submit(self, function: object, *given: object) -> None:
        self._pending.append(self._threads.submit(function, *given))  # type: ignore[arg-type]

    def settle(self) -> None:
        """Wait for all of it; what went wrong is raised here."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.result()


def _takes(target: Tensor, entry: Entry) -> bool:
    """Whether a tensor's memory is what the file holds, byte for byte."""
    return (
        target.device.type == "cpu"
        and target.dtype == TORCH_DTYPE[entry.dtype]
        and tuple(target.shape) == entry.shape
        and target.is_contiguous()
    )


def _put(piece: Tensor, item: ReadItem, planner: LoadPlanner, first: int) -> None:
    """Copy the part of a stored piece, of which there are the rows from `first` on, that an item asks for to
    where it belongs."""
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        piece = piece.narrow(dim, offset - (0 if dim else first), length)
    target = planner.resolve_tensor(item)
    target.detach().copy_(piece)
    planner.commit_tensor(item, target)


def _dcp_metadata(layout: TensorLayout) -> TensorStorageMetadata:
    chunks: Sequence[Chunk] = layout.chunks
    return TensorStorageMetadata(
        TensorProperties(TORCH_DTYPE[layout.dtype]),
        torch.Size(layout.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in chunks],
    )
