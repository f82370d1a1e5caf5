"""Reading what a load plan asks for, into the tensors that wait for it; each file is read once."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from titancli.checkpoint.format.files import read_into
from titancli.checkpoint.format.hashed import BLOCK, CHECKED, Digest, HashedReader
from titancli.checkpoint.format.layout import Chunk, TensorLayout
from titancli.checkpoint.format.manifest import DamagedCheckpoint
from titancli.checkpoint.format.tensorfile import ITEM_SIZE, Entry
from titancli.checkpoint.format.tensors import TORCH_DTYPE, TensorFiles


def load_planner() -> DefaultLoadPlanner:
    return DefaultLoadPlanner(flatten_state_dict=False)


class Reader(StorageReader):
    """Reads what a rank needs, and compares the checksums of `digests`, the files that are to be checked.

    The rank that needs most of a file reads it from its beginning to its end and hashes it on the way; if it
    is not what was written, it raises at the end. Ranks of other nodes may see other bytes: each hashes the
    pieces that it reads itself, or the whole file where an earlier titan wrote no checksums of pieces.

    Raises:
        EnvironmentProblem: a file is damaged; the tensors then hold some of its values.
    """

    def __init__(
        self, folder: Path, layouts: Mapping[str, TensorLayout], digests: Mapping[str, Digest]
    ) -> None:
        self._files, self._layouts, self._digests = TensorFiles(folder), layouts, digests
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one load to the next."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _dcp_metadata(layout) for name, layout in self._layouts.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The layouts are known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Give each rank the names of the files that it checks."""
        needs: list[Counter[str]] = [Counter() for _ in plans]
        for need, plan in zip(needs, plans, strict=True):
            for item in plan.items:
                layout, chunk = self._chunk(item.storage_index)
                need[chunk.file] += math.prod(item.lengths) * TORCH_DTYPE[layout.dtype].itemsize
        checks: list[list[str]] = [[] for _ in plans]
        load = [0] * len(plans)
        bare = {c.file for layout in self._layouts.values() for c in layout.chunks if not c.checksums}
        for file, digest in sorted(self._digests.items(), key=lambda pair: -pair[1].size):
            rank = max(range(len(plans)), key=lambda rank: (needs[rank][file], -load[rank]))
            others = [other for other in range(len(plans)) if needs[other][file]] if file in bare else []
            for checker in {rank, *others}:
                checks[checker].append(file)
                load[checker] += digest.size
        return [
            dataclasses.replace(plan, storage_data=files) for plan, files in zip(plans, checks, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, dict[str, list[ReadItem]]] = {file: {} for file in plan.storage_data}
        for item in plan.items:
            _, chunk = self._chunk(item.storage_index)
            wanted.setdefault(chunk.file, {}).setdefault(chunk.key, []).append(item)
        for file, pieces in wanted.items():
            if file in plan.storage_data:
                self._read_whole(file, pieces, planner)
            else:
                self._read_some(pieces, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_some(self, pieces: Mapping[str, list[ReadItem]], planner: LoadPlanner) -> None:
        for item in (item for items in pieces.values() for item in items):
            layout, chunk = self._chunk(item.storage_index)
            rows, first = self._read_rows(layout.dtype, chunk, item)
            _put(rows, item, planner, first)

    def _read_rows(self, dtype: str, chunk: Chunk, item: ReadItem) -> tuple[Tensor, int]:
        """Read the rows of a chunk that an item lies in, and hash the pieces of the file that they lie in;
        return them and the first one's number."""
        entry = self._files.entry(chunk.file, chunk.key, dtype, chunk.shape)
        first, count = (item.storage_offsets[0], item.lengths[0]) if chunk.shape else (0, 1)
        row = math.prod(chunk.shape[1:]) * ITEM_SIZE[dtype]
        start, stop = first * row, (first + count) * row
        low, high = start // CHECKED * CHECKED, min(-(-stop // CHECKED) * CHECKED, entry.nbytes)
        scratch = self._scratch_for(high - low)
        memory = scratch.numpy().data
        read_into(self._files.folder / chunk.file, entry.start + low, memory)
        for number, checksum in enumerate(chunk.checksums[low // CHECKED :] if self._digests else ()):
            piece = memory[number * CHECKED : (number + 1) * CHECKED]
            if piece and xxhash.xxh3_64(piece).hexdigest() != checksum:
                raise self._damaged(chunk.file)
        rows = scratch[start - low : stop - low].view(TORCH_DTYPE[dtype])
        return rows.view(count, *chunk.shape[1:]) if chunk.shape else rows.view(()), first

    def _damaged(self, file: str) -> DamagedCheckpoint:
        why = f"{file} is damaged: its checksum does not match, as {socket.gethostname()} reads it"
        return DamagedCheckpoint(self._files.folder, why)

    def _read_whole(self, file: str, pieces: Mapping[str, list[ReadItem]], planner: LoadPlanner) -> None:
        for item in (item for items in pieces.values() for item in items):  # before anything is filled
            layout, chunk = self._chunk(item.storage_index)
            self._files.entry(chunk.file, chunk.key, layout.dtype, chunk.shape)
        with HashedReader(self._files.folder / file) as stream:
            for entry in sorted(self._files.header(file).values(), key=lambda entry: entry.start):
                if entry.key in pieces and entry.nbytes:
                    self._skip(stream, entry.start)
                    self._read_entry(stream, entry, pieces[entry.key], planner)
            self._skip(stream, stream.size)
            if stream.digest() != self._digests[file]:
                raise self._damaged(file)

    def _read_entry(
        self, stream: HashedReader, entry: Entry, items: list[ReadItem], planner: LoadPlanner
    ) -> None:
        target = planner.resolve_tensor(items[0]).detach()
        if len(items) == 1 and _takes(target, entry):
            stream.readinto(target.reshape(-1).view(torch.uint8).numpy().data)
            planner.commit_tensor(items[0], target)
            return
        stream.settle()  # what was read into it before is hashed
        scratch = self._scratch_for(entry.nbytes)
        stream.readinto(scratch.numpy().data)
        stream.settle()
        value = scratch.view(TORCH_DTYPE[entry.dtype]).view(entry.shape)
        for item in items:
            _put(value, item, planner)

    def _skip(self, stream: HashedReader, position: int) -> None:
        if position > stream.position:
            stream.skip(position - stream.position, self._scratch_for(2 * BLOCK).numpy().data)

    def _scratch_for(self, size: int) -> Tensor:
        """Memory that is used again and again."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]

    def _chunk(self, index: MetadataIndex) -> tuple[TensorLayout, Chunk]:
        layout = self._layouts[index.fqn]
        if index.index is not None and index.index < len(layout.chunks):
            hinted = layout.chunks[index.index]
            if hinted.offsets == tuple(index.offset or ()):
                return layout, hinted
        return layout, next(chunk for chunk in layout.chunks if chunk.offsets == tuple(index.offset or ()))


def _takes(target: Tensor, entry: Entry) -> bool:
    """Whether a tensor's memory is what the file holds, byte for byte."""
    return (
        target.device.type == "cpu"
        and target.dtype == TORCH_DTYPE[entry.dtype]
        and tuple(target.shape) == entry.shape
        and target.is_contiguous()
    )


def _put(piece: Tensor, item: ReadItem, planner: LoadPlanner, first: int = 0) -> None:
    """Copy the part of a stored piece, of which there are the rows from `first` on, that an item asks for to
    where it belongs."""
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        piece = piece.narrow(dim, offset - (0 if dim else first), length)
    target = planner.resolve_tensor(item)
    target.detach().copy_(piece)
    planner.commit_tensor(item, target)


def _dcp_metadata(layout: TensorLayout) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(TORCH_DTYPE[layout.dtype]),
        torch.Size(layout.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in layout.chunks],
    )
