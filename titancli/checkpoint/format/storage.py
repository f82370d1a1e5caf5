"""A rank's part of a save: its pieces, and the safetensors files that they go into.

torch.distributed.checkpoint (DCP) says which piece of a tensor a rank holds, and which pieces make up one
that is loaded; the files are ours. DCP's own storage pickles its metadata, and every entry that is not a
tensor. Here only tensors are stored, as safetensors, and the metadata is JSON: nothing read from the disk is
unpickled. (Ranks of one run exchange their plans through torch, which pickles them in memory.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from titancli.checkpoint.format.disk import write_file
from titancli.checkpoint.format.hashed import PIECE, Digest
from titancli.checkpoint.format.layout import Chunk
from titancli.checkpoint.format.metadata import part_bytes, part_name
from titancli.checkpoint.format.tensorfile import Entry, TensorFileWriter, split
from titancli.checkpoint.format.tensors import dtype_name, tensor_bytes
from titancli.errors import TitanError


@dataclass(frozen=True)
class Pieces:
    """The pieces that a rank holds of the tensors to save."""

    items: Sequence[WriteItem]
    resolve: Callable[[WriteItem], Tensor]
    """Returns an item's values when they are written: the live ones, or those of staging buffers."""


def pieces_of(tensors: Mapping[str, Tensor]) -> Pieces:
    """Return this rank's pieces, without touching the data yet.

    Raises:
        TitanError: a tensor is a pending sum over ranks.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise TitanError(f"{name} is a partial sum over ranks and cannot be saved")
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors))
    return Pieces(planner.create_local_plan().items, lambda item: _tensor(planner.resolve_data(item)))


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, torch.Tensor):
        raise TitanError(f"a checkpoint holds tensors only, not {type(value).__name__}")
    return value


def write_pieces(
    folder: Path, rank: int, items: Sequence[WriteItem], resolve: Callable[[WriteItem], Tensor]
) -> dict[str, Digest]:
    """Write a rank's files: pieces as safetensors, and their positions as its part of the metadata.

    Raises:
        OSError: the disk refuses.
        TitanError: a tensor is not the one that was planned.

    Returns:
        The files by name; none if the rank has nothing to write.
    """
    # Largest elements first keeps every tensor aligned in its file.
    items = sorted(items, key=lambda item: -item.tensor_data.properties.dtype.itemsize)  # type: ignore[union-attr]
    files: dict[str, Digest] = {}
    headers: dict[str, Digest] = {}
    chunks: dict[str, list[Chunk]] = {}
    for number, part in enumerate(split([_nbytes(item) for item in items])):
        name = f"rank-{rank:05d}{f'-{number}' if number else ''}.safetensors"
        inside = [items[i] for i in part]
        with TensorFileWriter(folder / name, _entries(inside)) as file:
            for item, entry in zip(inside, file.entries, strict=True):
                value = _tensor(resolve(item))
                if tuple(value.shape) != entry.shape or dtype_name(entry.key, value.dtype) != entry.dtype:
                    raise TitanError(
                        f"{entry.key} does not have the shape and dtype that were planned for it"
                    )
                file.write(tensor_bytes(value))
            files[name], headers[name] = file.close(), file.header
            for item, entry, sums in zip(inside, file.entries, file.checksums(), strict=True):
                offsets = tuple(item.tensor_data.chunk.offsets)  # type: ignore[union-attr]
                chunk = Chunk(offsets, entry.shape, name, entry.key, sums, PIECE, entry.start)
                chunks.setdefault(item.index.fqn, []).append(chunk)
    if chunks:
        files[part_name(rank)] = write_file(folder / part_name(rank), part_bytes(chunks, headers))
    return files


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data else 0


def _entries(items: list[WriteItem]) -> list[Entry]:
    """Return a file's entries; further pieces of a tensor have their offsets in their key."""
    entries: dict[str, Entry] = {}
    for item in items:
        data = item.tensor_data
        if data is None:
            raise TitanError(f"the checkpoint's entry {item.index.fqn!r} is not a tensor")
        key = item.index.fqn
        if key in entries:
            key = f"{key}@{','.join(map(str, data.chunk.offsets))}"
        if key in entries:
            raise TitanError(f"two tensors of a checkpoint have the name {key!r}")
        entries[key] = Entry(key, dtype_name(key, data.properties.dtype), tuple(data.chunk.sizes))
    return list(entries.values())
