"""Loading a checkpoint into tensors of any layout."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from titancli.checkpoint.exclude import NOTHING, Exclusion
from titancli.checkpoint.format.columns import Columns, shared_by_columns
from titancli.checkpoint.format.files import look_again, waiting_for_late_files
from titancli.checkpoint.format.hashed import Digest
from titancli.checkpoint.format.layout import FILE_NAME, Box
from titancli.checkpoint.format.manifest import (
    DamagedCheckpoint,
    Manifest,
    Verify,
    faults,
    manifest_bytes,
    read_manifest,
)
from titancli.checkpoint.format.metadata import PART_NAME, Described, Metadata, open_metadata
from titancli.checkpoint.format.reader import Part, Reader, parts_of
from titancli.checkpoint.format.replicas import shared_among_replicas
from titancli.checkpoint.format.tensors import TORCH_DTYPE
from titancli.checkpoint.sources import Range, Sources, sources_of
from titancli.distributed import shared_folder
from titancli.distributed.process_group import patient_group
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem, TitanError

T = TypeVar("T")

logger = logging.getLogger(__name__)


def load_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    verify: Verify = "full",
    exclude: Exclusion = NOTHING,
    optional: str | None = None,
    group: dist.ProcessGroup | None = None,
    begin: Callable[[], None] | None = None,
    widens: bool = False,
) -> dict[str, Any]:
    """Fill tensors in place from a checkpoint, whatever layout it was saved under; return its JSON state.

    Collective over `group` (None: all ranks), with a timeout of `process_group.PATIENCE` for other ranks'
    disks; each rank passes the tensors that it has. Names, shapes and dtypes of all ranks together must be
    the checkpoint's. If only one part is requested (all names begin with `model.`), the rest of the
    checkpoint is left unused, and values are cast to the requested dtypes. Each rank reads only what it
    needs; if `verify` is "full", it is hashed as it is read.

    Tensors in `exclude` are left as they are. Of tensors whose names begin with `optional`, those that the
    checkpoint lacks are left as they are, and those that nobody requests are left out; both are logged.
    `begin` is called before the first tensor is written. With `widens`, the checkpoint may hold bfloat16 of
    what is float32 here.

    Raises:
        EnvironmentProblem: the folder is not a checkpoint, or is damaged; names the file. After a wrong
            checksum the tensors hold bad values: all ranks raise, and must load something else or stop.
        TitanError: names, shapes or dtypes differ (names them all), or `exclude` names something that is
            not there. The tensors are unchanged.
    """
    ranks = Ranks(patient_group() if group is None else group)
    manifest, metadata = _open_together(folder, verify, ranks)
    exclude.check(metadata.tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if not exclude.has(name)}
    asked, alike = _asked_together(tensors, ranks)
    parts = {name.partition(".")[0] for name in asked}
    there = {
        name: tensor
        for name, tensor in metadata.tensors.items()
        if name.partition(".")[0] in parts and not exclude.has(name)
    }
    if optional is not None:
        lacking = _only_in(asked, there, optional, f"not in {folder}, and so left as they are")
        further = _only_in(there, asked, optional, f"in {folder} alone, and so left out")
        asked, there = _others(asked, lacking), _others(there, further)
        tensors = _others(tensors, lacking)
    strict = parts != {"model"}
    wanted = {name: (shape, dtype if strict else None) for name, (shape, dtype) in asked.items()}
    if widens:
        wanted = {name: _widened(there.get(name), *one) for name, one in wanted.items()}
    if found := _mismatch(there, wanted):
        raise TitanError(
            f"checkpoint {folder} does not fit this recipe: {found}",
            hint="undo the change in the recipe, or start a new run from the weights of the checkpoint: "
            'weights = "CHECKPOINT"',
        )
    if begin is not None:
        begin()
    data = {name: digest for name, digest in manifest.files.items() if FILE_NAME.match(name)}
    if sources_of(folder) is not None:
        verify = "full"  # what was not sent reads as zeros
    with waiting_for_late_files(_patience(ranks)):
        _fill(folder, metadata, tensors, data if verify == "full" else None, ranks, alike)
    return manifest.state


def _only_in(some: Mapping[str, Any], others: Mapping[str, Any], optional: str, what: str) -> list[str]:
    """Return the optional names of some that are not among the others; rank 0 logs them."""
    found = sorted(name for name in some if name.startswith(optional) and name not in others)
    if found and dist.get_rank() == 0:
        logger.warning("%s", name_lists({what: found}))
    return found


def _others(tensors: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def _fill(
    folder: Path,
    metadata: Metadata,
    tensors: Mapping[str, Tensor],
    digests: Mapping[str, Digest] | None,
    ranks: Ranks,
    alike: list[str],
) -> None:
    """Read tensors that are known to be in the checkpoint, cast to their dtypes; collective.

    Each byte is read and hashed once, except for small tensors: ranks that hold a tensor by columns read rows
    of it, and exchange the columns; replicas read a part each and, once all ranks have verified what they
    read, send it to each other.
    """
    all_ranks = ranks.size > 1 and ranks.size == dist.get_world_size()
    shared = shared_among_replicas(tensors, alike) if all_ranks else {}
    mine = {name: tensor for name, tensor in tensors.items() if name not in shared or shared[name].mine}

    def divided() -> tuple[dict[str, Columns], list[Part]]:
        columns = shared_by_columns(mine, alike, metadata) if all_ranks else {}
        return columns, parts_of({name: tensor for name, tensor in mine.items() if name not in columns})

    columns, parts = _on_each(ranks, folder, divided)
    rows = [columns[name].part(name, mine[name]) for name in sorted(columns)]
    wanted: dict[str, list[Box]] = {name: [] for name in mine}
    for part in (*parts, *rows):
        wanted[part.name].append(part.box)

    def reader() -> Reader:
        return Reader(folder, metadata.layouts(wanted), digests)

    def read() -> None:
        failures: list[Exception] = []
        with _kept(failures):
            reading = reader()
            reading.fill(parts)
            if digests is not None and sources is None:
                reading.check_headers(metadata.headers(ranks.rank, ranks.size))
        for part in rows:
            memory = torch.empty(part.memory.shape, dtype=part.memory.dtype)
            if not failures:
                with _kept(failures):
                    reading.fill([part._replace(memory=memory)])
            # Whatever has failed here: the others wait.
            columns[part.name].exchange(partial(_rows, memory), memory.dtype, mine[part.name], ranks.group)
        if failures:
            raise failures[0]

    sources = sources_of(folder)
    if sources is None:
        _on_each(ranks, folder, read)
    else:
        _fill_from(
            sources,
            ranks,
            folder,
            lambda: metadata.parts(wanted),
            lambda: reader().ranges([*parts, *rows]),
            read,
        )
    for name, replicas in shared.items():
        replicas.give(tensors[name])


def _rows(memory: Tensor, low: int, high: int) -> Tensor:
    return memory[low:high]


@contextmanager
def _kept(failures: list[Exception]) -> Iterator[None]:
    """Append an exception raised inside the block to `failures`."""
    try:
        yield
    except Exception as error:
        failures.append(error)


def _fill_from(
    sources: Sources,
    ranks: Ranks,
    folder: Path,
    parts: Callable[[], list[str]],
    ranges: Callable[[], Iterable[Range]],
    read: Callable[[], None],
) -> None:
    """Fill as `_fill` does from files on several nodes; damaged ones are fetched from another node."""
    bad: list[str | None] = []

    def guarded() -> None:
        try:
            read()
        except DamagedCheckpoint as error:
            bad.append(error.file)
            raise

    sources.take(_on_each(ranks, folder, lambda: sources.whole(parts())))
    while True:
        sources.take(_on_each(ranks, folder, lambda: list(ranges())))
        try:
            return _on_each(ranks, folder, guarded)
        except DamagedCheckpoint:
            if not sources.refuse(bad.pop() if bad else None):
                raise


def _on_each(ranks: Ranks, folder: Path, function: Callable[[], T]) -> T:
    """Return a function's result on this rank; raise a problem with the checkpoint on any rank on all of
    them."""
    try:
        return ranks.call(f"loading {folder}", function)
    except DamagedCheckpoint:
        raise
    except EnvironmentProblem as cause:
        raise DamagedCheckpoint(folder, cause.message) from cause


def _widened(
    has: Described | None, shape: tuple[int, ...], dtype: torch.dtype | None
) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Return a shape, and None for a dtype that holds all stored values."""
    stored = None if has is None else TORCH_DTYPE[has.dtype]
    return shape, None if (stored, dtype) == (torch.bfloat16, torch.float32) else dtype


Asked = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _asked_together(tensors: Mapping[str, Tensor], ranks: Ranks) -> tuple[Asked, list[str]]:
    """Return the shapes and dtypes requested by any rank (under a pipeline each requests only its stages),
    and a checksum of each rank's request. Most ranks request the same, which is sent once."""
    asked = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(tensors.items())}
    alike = ranks.gather(xxhash.xxh3_128(repr(asked).encode()).hexdigest())
    everyones: Asked = {}  # the same on all ranks, so that all find the same differences
    for sender in sorted({alike.index(found) for found in set(alike)}):
        sent = ranks.broadcast(asked, sender)
        everyones |= {name: row for name, row in sent.items() if everyones.get(name, row) == row}
        if twice := [name for name, row in sent.items() if everyones[name] != row]:
            raise TitanError(f"{min(twice)} has different dtypes or shapes on the ranks and cannot be loaded")
    return everyones, alike


def _open_together(folder: Path, verify: Verify, ranks: Ranks) -> tuple[Manifest, Metadata]:
    """Open a checkpoint on all ranks, or raise the first rank's error on all of them.

    A node's view of a shared disk may be stale: all ranks must read the same checkpoint, and they wait for
    what the first one sees.
    """
    opened: tuple[Manifest, Metadata] | None = None
    failure: TitanError | None = None
    if ranks.rank == 0:
        opened, failure = _try_to_open(folder, verify, files=True, late=_patience(ranks))
    seen = ranks.broadcast(opened and _identity(opened[0]))
    if ranks.rank > 0:
        with waiting_for_late_files(_patience(ranks) if seen is not None else 0.0):
            opened, failure = _try_to_open(folder, verify, files=False)
            while seen != (opened and _identity(opened[0])) and look_again():
                opened, failure = _try_to_open(folder, verify, files=False)
    everyones = ranks.gather((failure, opened and _identity(opened[0]), socket.gethostname()))
    failed = [(rank, found, host) for rank, (found, _, host) in enumerate(everyones) if found is not None]
    if failed:
        rank, found, host = failed[0]
        if len(failed) == len(everyones) or isinstance(found, DamagedCheckpoint):
            raise found
        raise EnvironmentProblem(
            f"the ranks read different checkpoints: rank {rank} on {host} alone: {found.message}",
            hint="put the folder on storage that all nodes share; if it is, a node's view of it is stale",
        )
    for rank, (_, identity, host) in enumerate(everyones):
        if identity != everyones[0][1]:
            raise EnvironmentProblem(
                f"the ranks read different checkpoints: rank {rank} on {host} sees another {folder} than "
                f"rank 0 on {everyones[0][2]}",
                hint="put the folder on storage that all nodes share; if it is, a node's view of it is stale",
            )
    if opened is None:
        raise TitanError(f"checkpoint {folder} was not opened")
    return opened


def _patience(ranks: Ranks) -> float:
    """Return how long to wait for files that other nodes may have written, in seconds."""
    return shared_folder.PATIENCE if ranks.size > 1 else 0.0


def _try_to_open(
    folder: Path, verify: Verify, *, files: bool, late: float = 0.0
) -> tuple[tuple[Manifest, Metadata] | None, TitanError | None]:
    """Return the result of `open_checkpoint`, or its error, which the waiting ranks must learn of."""
    try:
        return open_checkpoint(folder, verify=verify, data=False, files=files, late=late), None
    except TitanError as error:
        return None, error
    except Exception as error:
        return None, TitanError(f"checkpoint {folder} cannot be opened: {type(error).__name__}: {error}")


def _identity(manifest: Manifest) -> str:
    """Return an identity shared only by copies of one checkpoint: of its step, state, files and layout."""
    return xxhash.xxh3_64(manifest_bytes(replace(manifest, created=""))).hexdigest()


def open_checkpoint(
    folder: Path, *, verify: Verify = "full", data: bool = True, files: bool = True, late: float = 0.0
) -> tuple[Manifest, Metadata]:
    """Read a checkpoint's manifest and layout, and check its files.

    Args:
        data: whether to verify the data files and the parts of the metadata; if not, their readers do.
        files: whether to check names and sizes; if not, another rank does.
        late: seconds to wait for files that the manifest lists.

    Raises:
        EnvironmentProblem: the folder is not a checkpoint, or is damaged; names the file.
    """
    manifest = read_manifest(folder)
    chosen = {name for name in manifest.files if data or not (FILE_NAME.match(name) or PART_NAME.match(name))}
    try:
        with waiting_for_late_files(late):
            if files and (found := faults(folder, manifest, verify=verify, only=chosen)):
                raise DamagedCheckpoint(folder, "; ".join(found))
            return manifest, open_metadata(folder, manifest.files)
    except DamagedCheckpoint:
        raise
    except EnvironmentProblem as error:
        raise DamagedCheckpoint(folder, error.message) from error


def _mismatch(
    there: Mapping[str, Described], wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]
) -> str:
    """Return what prevents a checkpoint from filling tensors of these shapes and dtypes (None: any); empty:
    nothing."""
    shapes, dtypes = [], []
    for name in sorted(wanted.keys() & there.keys()):
        shape, dtype = wanted[name]
        has = there[name]
        if has.shape != shape:
            shapes.append(f"{name} is {list(has.shape)} in the checkpoint and {list(shape)} in the model")
        elif dtype not in (None, TORCH_DTYPE[has.dtype]):
            stored, here = (str(d).removeprefix("torch.") for d in (TORCH_DTYPE[has.dtype], dtype))
            dtypes.append(f"{name} is {stored} in the checkpoint and {here} in the model")
    return name_lists(
        {
            "it lacks": sorted(wanted.keys() - there.keys()),
            "the model lacks": sorted(there.keys() - wanted.keys()),
            "shapes differ": shapes,
            "dtypes differ": dtypes,
        }
    )


def name_lists(groups: Mapping[str, Iterable[str]], limit: int = 6) -> str:
    """Return lists of names as text, `it lacks a, b and 3 more; shapes differ: …`; empty if all are."""
    parts = []
    for title, names in groups.items():
        names = list(names)
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            parts.append(f"{title}: {', '.join(names[:limit])}{more}")
    return "; ".join(parts)
