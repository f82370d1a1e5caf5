"""torch.distributed.checkpoint plans who writes and reads which part of which tensor; the files are ours.

DCP's own storage pickles its metadata and every entry that is no tensor. Here only tensors are stored, as
safetensors, and the metadata is JSON: nothing read from the disk is unpickled. (Ranks of one run exchange
their plans through torch, which pickles them in memory.)
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from titancli.checkpoint.format.hashed import Digest
from titancli.checkpoint.format.layout import Chunk, TensorLayout
from titancli.checkpoint.format.tensorfile import Entry, TensorFileWriter, split
from titancli.checkpoint.format.tensors import dtype_name, tensor_bytes
from titancli.errors import TitanError


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one piece of a tensor was written."""

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    digest: Digest
    """Of the whole file."""
    checksums: tuple[str, ...]
    """Of the piece, see `layout.Chunk`."""


@dataclasses.dataclass(frozen=True)
class Order:
    """What the coordinator tells each rank, along with its plan."""

    folder: Path
    needed: int
    """Bytes, all ranks together."""


def several_ranks(group: dist.ProcessGroup | None) -> bool:
    """Whether there is somebody to plan with.

    One rank alone plans without its process group: gloo copies large messages in a thread of its own, with
    OpenMP threads of their own, and every training step after that is a third slower.
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


class SavePlannerOf(DefaultSavePlanner):
    """DCP's default planner over a plan that was made before, with the data from elsewhere.

    `resolve` gives an item's values when they are written: from staging buffers, or from another file.
    """

    def __init__(self, plan: SavePlan, resolve: Callable[[WriteItem], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._local, self._resolve = plan, resolve

    def create_local_plan(self) -> SavePlan:
        return self._local

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._resolve(write_item)


def plan_of(tensors: Mapping[str, Tensor]) -> SavePlannerOf:
    """This rank's part of a save, without the data's being touched yet.

    Raises:
        TitanError: a tensor is a sum that the ranks have not added up yet.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise TitanError(f"{name} is a partial sum over ranks and cannot be saved")
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors))
    return SavePlannerOf(planner.create_local_plan(), lambda item: _tensor(planner.resolve_data(item)))


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, torch.Tensor):
        raise TitanError(f"a checkpoint holds tensors only, not {type(value).__name__}")
    return value


class Writer(StorageWriter):
    """Writes each rank's pieces into its own safetensors files.

    `open_folder(needed_bytes)` makes the folder to write in, on the coordinator, before anyone writes.
    `complete(layouts, files)` ends the save there when every rank has written. `explain(error, needed_bytes)`
    puts an error of the disk into words, on the rank that has it.
    """

    def __init__(
        self,
        rank: int,
        open_folder: Callable[[int], Path],
        complete: Callable[[dict[str, TensorLayout], dict[str, Digest]], None],
        explain: Callable[[OSError, int], Exception],
    ) -> None:
        self._rank = rank
        self._open_folder, self._complete, self._explain = open_folder, complete, explain

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The rank is known already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                raise TitanError(
                    f"the checkpoint's entry {item.index.fqn!r} is not a tensor and would have to be pickled",
                    hint="put tensors into the checkpoint, and everything else into its JSON state",
                )
            dtype_name(item.index.fqn, item.tensor_data.properties.dtype)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        needed = sum(_item_bytes(item) for plan in plans for item in plan.items)
        order = Order(self._open_folder(needed), needed)
        return [dataclasses.replace(plan, storage_data=order) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        order: Order = plan.storage_data
        # Largest elements first keeps every tensor aligned in its file. Empty pieces need no place.
        items = sorted(
            (item for item in plan.items if _item_bytes(item)),
            key=lambda item: -item.tensor_data.properties.dtype.itemsize,  # type: ignore[union-attr]
        )
        results: list[WriteResult] = []
        try:
            for number, part in enumerate(split([_item_bytes(item) for item in items])):
                name = f"rank-{self._rank:05d}{f'-{number}' if number else ''}.safetensors"
                results += self._write_file(order.folder / name, [items[i] for i in part], planner)
        except OSError as error:
            raise self._explain(error, order.needed) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, path: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        entries = _entries(items)
        with TensorFileWriter(path, entries) as file:
            for item, entry in zip(items, entries, strict=True):
                value = _tensor(planner.resolve_data(item))
                if tuple(value.shape) != entry.shape or dtype_name(entry.key, value.dtype) != entry.dtype:
                    raise TitanError(
                        f"{entry.key} does not have the shape and dtype that were planned for it"
                    )
                file.write(tensor_bytes(value))
            digest = file.close()
            checksums = file.checksums()
        return [
            WriteResult(
                item.index, entry.nbytes, Stored(path.name, entry.key, entry.dtype, entry.shape, digest, sums)
            )
            for item, entry, sums in zip(items, entries, checksums, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        files: dict[str, Digest] = {}
        for result in (result for rank in results for result in rank):
            stored: Stored = result.storage_data
            offsets = tuple(result.index.offset or ())
            chunks[result.index.fqn].append(
                Chunk(offsets, stored.shape, stored.file, stored.key, stored.checksums)
            )
            files[stored.file] = stored.digest
        layouts = {}
        for name, tensor in metadata.state_dict_metadata.items():
            dtype = dtype_name(name, tensor.properties.dtype)  # type: ignore[union-attr]
            layouts[name] = TensorLayout(dtype, tuple(tensor.size), tuple(chunks[name]))  # type: ignore[union-attr]
        self._complete(layouts, files)


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data else 0


def _entries(items: list[WriteItem]) -> list[Entry]:
    """What a file holds; a second piece of one tensor gets its offsets into its key."""
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
