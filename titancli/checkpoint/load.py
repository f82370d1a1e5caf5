"""Loading: into tensors of any layout, or whole tensors one at a time without torch.distributed."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from titancli.checkpoint.exclude import NOTHING, Exclusion
from titancli.checkpoint.format.columns import Columns, shared_by_columns
from titancli.checkpoint.format.files import look_again, waiting_for_late_files
from titancli.checkpoint.format.hashed import Digest
from titancli.checkpoint.format.layout import FILE_NAME, Box, Chunk
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
from titancli.checkpoint.format.storage import several_ranks
from titancli.checkpoint.format.tensors import TORCH_DTYPE, TensorFiles
from titancli.checkpoint.peers.sources import Range, Sources, sources_of
from titancli.checkpoint.save import raise_failure
from titancli.distributed import shared_folder
from titancli.distributed.private import RanksTogether
from titancli.distributed.process_group import patient_group
from titancli.errors import EnvironmentProblem, TitanError

T = TypeVar("T")


def load_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    verify: Verify = "full",
    exclude: Exclusion = NOTHING,
    group: dist.ProcessGroup | None = None,
    begin: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Fill tensors in place from a checkpoint, whatever layout it was saved under; return its JSON state.

    Collective over `group` (when None all ranks, which then wait for each other's disks for as long as
    `process_group.PATIENCE`); a rank gives what it has. Names, shapes and dtypes
    of all ranks together must be the checkpoint's;
    but when one part alone is asked for (all names begin with `model.`), the rest of the checkpoint is left
    unused, and values are cast to the dtypes asked for. Each rank reads only what it needs; where
    `verify` is "full", it is hashed on its way into the tensors.

    What `exclude` has is left as it is. `begin` is called before the first tensor is written.

    Raises:
        EnvironmentProblem: it is no checkpoint, or damaged; names the file. When a wrong checksum is found
            the tensors hold bad values: all ranks raise, and must load something else or stop.
        TitanError: names, shapes or dtypes differ; names them all. Or `exclude` names what is not there.
            The tensors are as they were.
    """
    group = patient_group() if group is None else group
    manifest, metadata = _open_together(folder, verify, group)
    exclude.check(metadata.tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if not exclude.has(name)}
    asked, alike = _asked_together(tensors, group)
    parts = {name.partition(".")[0] for name in asked}
    there = {
        name: tensor
        for name, tensor in metadata.tensors.items()
        if name.partition(".")[0] in parts and not exclude.has(name)
    }
    strict = parts != {"model"}
    wanted = {name: (shape, dtype if strict else None) for name, (shape, dtype) in asked.items()}
    if found := differences(there, wanted):
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
    with waiting_for_late_files(_patience(group)):
        _fill(folder, metadata, tensors, data if verify == "full" else None, group, alike)
    return manifest.state


def _fill(
    folder: Path,
    metadata: Metadata,
    tensors: Mapping[str, Tensor],
    digests: Mapping[str, Digest] | None,
    group: dist.ProcessGroup | None,
    alike: list[str],
) -> None:
    """Read tensors that are known to be in the checkpoint, cast to the dtypes they have; collective.

    Each byte is read and hashed once, but for small tensors: ranks that hold a tensor by columns read rows of
    it, and send each other the columns; replicas read a part each, and when all ranks have found what they
    read to be good, give it to each other.
    """
    ranks = RanksTogether(group, several_ranks(group), 0)
    all_ranks = ranks.use_dist and ranks.get_world_size() == dist.get_world_size()
    shared = shared_among_replicas(tensors, alike) if all_ranks else {}
    mine = {name: tensor for name, tensor in tensors.items() if name not in shared or shared[name].mine}

    def divided() -> tuple[dict[str, Columns], list[Part]]:
        columns = shared_by_columns(mine, alike, metadata) if all_ranks else {}
        return columns, parts_of({name: tensor for name, tensor in mine.items() if name not in columns})

    columns, parts = _together(ranks, folder, divided)
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
                reading.check_headers(metadata.headers(ranks.get_rank(), ranks.get_world_size()))
        for part in rows:
            memory = torch.empty(part.memory.shape, dtype=part.memory.dtype)
            if not failures:
                with _kept(failures):
                    reading.fill([part._replace(memory=memory)])
            # Whatever has failed here: the others wait.
            columns[part.name].exchange(partial(_rows, memory), memory.dtype, mine[part.name], group)
        if failures:
            raise failures[0]

    sources = sources_of(folder)
    if sources is None:
        _together(ranks, folder, read)
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
    """Keep what is raised inside for later."""
    try:
        yield
    except Exception as error:
        failures.append(error)


def _fill_from(
    sources: Sources,
    ranks: RanksTogether,
    folder: Path,
    parts: Callable[[], list[str]],
    ranges: Callable[[], Iterable[Range]],
    read: Callable[[], None],
) -> None:
    """The same, of files that lie on several nodes: from another one where a node's are damaged."""
    bad: list[str | None] = []

    def guarded() -> None:
        try:
            read()
        except DamagedCheckpoint as error:
            bad.append(error.file)
            raise

    sources.take(_together(ranks, folder, lambda: sources.whole(parts())))
    while True:
        sources.take(_together(ranks, folder, lambda: list(ranges())))
        try:
            return _together(ranks, folder, guarded)
        except DamagedCheckpoint:
            if not sources.refuse(bad.pop() if bad else None):
                raise


def _together(ranks: RanksTogether, folder: Path, function: Callable[[], T]) -> T:
    """Return what a function returns on this rank; what is wrong on any rank is raised on all of them."""
    mine: list[T] = []
    try:
        ranks.all_reduce("read", lambda: mine.append(function()), lambda done: None)
    except CheckpointException as error:
        try:
            raise_failure(error, f"loading {folder}")
        except EnvironmentProblem as cause:
            if isinstance(cause, DamagedCheckpoint):
                raise
            raise DamagedCheckpoint(folder, cause.message) from cause
    return mine[0]


def everywhere(doing: str, function: Callable[[], T]) -> list[T]:
    """Return what a function returns on each rank; what is wrong on any rank is raised on all of them.
    Collective.

    Raises:
        TitanError: the first failing rank's own, or one that names the rank and the cause.
    """
    group = patient_group()
    try:
        return RanksTogether(group, several_ranks(group), 0).all_gather("read", function)
    except CheckpointException as error:
        raise_failure(error, doing)


def on_every_rank(doing: str, function: Callable[[], T]) -> T:
    """Return what a function returns on this rank; otherwise as `everywhere`."""
    mine: list[T] = []
    everywhere(doing, lambda: mine.append(function()))
    return mine[0]


Asked = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _asked_together(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> tuple[Asked, list[str]]:
    """Shapes and dtypes of what any rank asks for: under a pipeline each asks for its own stages alone. And a
    checksum of what each rank asks for; most ask for the same, which is sent once."""
    asked = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(tensors.items())}
    checksum = xxhash.xxh3_128(repr(asked).encode()).hexdigest()
    if not several_ranks(group):
        return asked, [checksum]
    alike: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(alike, checksum, group=group)
    everyones: Asked = {}  # the same on all ranks, so that all find the same differences
    for sender in sorted({alike.index(found) for found in set(alike)}):
        sent: list[Any] = [asked if dist.get_rank(group) == sender else None]
        source = sender if group is None else dist.get_global_rank(group, sender)
        dist.broadcast_object_list(sent, src=source, group=group)
        everyones |= {name: row for name, row in sent[0].items() if everyones.get(name, row) == row}
        if twice := [name for name, row in sent[0].items() if everyones[name] != row]:
            raise TitanError(f"{min(twice)} has different dtypes or shapes on the ranks and cannot be loaded")
    return everyones, alike


def _open_together(
    folder: Path, verify: Verify, group: dist.ProcessGroup | None
) -> tuple[Manifest, Metadata]:
    """Open a checkpoint on all ranks, or raise the first rank's error on all of them.

    A node's view of a shared disk may be stale: what the ranks read must be one and the same, and what the
    first one sees the others wait for.
    """
    opened: tuple[Manifest, Metadata] | None = None
    failure: TitanError | None = None
    first = not several_ranks(group) or dist.get_rank(group) == 0
    if first:
        opened, failure = _try_to_open(folder, verify, files=True, late=_patience(group))
    if several_ranks(group):
        seen: list[Any] = [opened and _identity(opened[0])]
        dist.broadcast_object_list(
            seen, src=0 if group is None else dist.get_global_rank(group, 0), group=group
        )
        if not first:
            with waiting_for_late_files(_patience(group) if seen[0] is not None else 0.0):
                opened, failure = _try_to_open(folder, verify, files=False)
                while seen[0] != (opened and _identity(opened[0])) and look_again():
                    opened, failure = _try_to_open(folder, verify, files=False)
    everywhere: list[Any] = [(failure, opened and _identity(opened[0]), socket.gethostname())]
    if several_ranks(group):
        mine, everywhere = everywhere[0], [None] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, mine, group=group)
    failed = [(rank, found, host) for rank, (found, _, host) in enumerate(everywhere) if found is not None]
    if failed:
        rank, found, host = failed[0]
        if len(failed) == len(everywhere) or isinstance(found, DamagedCheckpoint):
            raise found
        raise EnvironmentProblem(
            f"the ranks read different checkpoints: rank {rank} on {host} alone: {found.message}",
            hint="put the folder on storage that all nodes share; if it is, a node's view of it is stale",
        )
    for rank, (_, identity, host) in enumerate(everywhere):
        if identity != everywhere[0][1]:
            raise EnvironmentProblem(
                f"the ranks read different checkpoints: rank {rank} on {host} sees another {folder} than "
                f"rank 0 on {everywhere[0][2]}",
                hint="put the folder on storage that all nodes share; if it is, a node's view of it is stale",
            )
    if opened is None:
        raise TitanError(f"checkpoint {folder} was not opened")
    return opened


def _patience(group: dist.ProcessGroup | None) -> float:
    """Return how long files are waited for that other nodes may have written."""
    return shared_folder.PATIENCE if several_ranks(group) else 0.0


def _try_to_open(
    folder: Path, verify: Verify, *, files: bool, late: float = 0.0
) -> tuple[tuple[Manifest, Metadata] | None, TitanError | None]:
    """Return what `open_checkpoint` returns, or what it raises: other ranks wait, and must hear of it."""
    try:
        return open_checkpoint(folder, verify=verify, data=False, files=files, late=late), None
    except TitanError as error:
        return None, error
    except Exception as error:
        return None, TitanError(f"checkpoint {folder} cannot be opened: {type(error).__name__}: {error}")


def _identity(manifest: Manifest) -> str:
    """Return what is the same for copies of a checkpoint alone: its step, state and files, the layout too."""
    return xxhash.xxh3_64(manifest_bytes(replace(manifest, created=""))).hexdigest()


def open_checkpoint(
    folder: Path, *, verify: Verify = "full", data: bool = True, files: bool = True, late: float = 0.0
) -> tuple[Manifest, Metadata]:
    """Read a checkpoint's manifest and layout, and check its files.

    `data` false: the checksums of the data files, and of where pieces lie, are left to who reads them.
    `files` false: somebody else looks at names and sizes. `late`: seconds for which files are waited for that
    the manifest names.

    Raises:
        EnvironmentProblem: it is no checkpoint, or damaged; names the file.
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


def differences(
    there: Mapping[str, Described], wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]
) -> str:
    """What keeps a checkpoint from filling tensors of these shapes and dtypes (None: any); empty: nothing."""
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
    """`it lacks a, b and 3 more; shapes differ: …`; empty when every group is."""
    parts = []
    for title, names in groups.items():
        names = list(names)
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            parts.append(f"{title}: {', '.join(names[:limit])}{more}")
    return "; ".join(parts)


class CheckpointReader:
    """A checkpoint's tensors, whole and one at a time, in one process without torch.distributed.

    Raises:
        EnvironmentProblem: it is no checkpoint, or damaged; names the file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        verify: Verify = "full",
        prefix: str = "",
        reuse: bool = False,
        exclude: Exclusion = NOTHING,
    ) -> None:
        """
        Args:
            prefix: only tensors whose name begins so, and named without it (`"model."`).
            reuse: a tensor that lies in several pieces is put together in the memory of the one before:
                fresh memory costs more than the copy.
        """
        self.folder = folder
        self._room: Tensor | None = torch.empty(0, dtype=torch.uint8) if reuse else None
        self.manifest, self._metadata = open_checkpoint(folder, verify=verify)
        self._tensors = {
            n.removeprefix(prefix): (n, tensor)
            for n, tensor in self._metadata.tensors.items()
            if n.startswith(prefix) and not exclude.has(n)
        }
        self._files = TensorFiles(folder)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._described(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        return TORCH_DTYPE[self._described(name)[1].dtype]

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU; where it lies in one piece, mapped and not yet read."""
        stored, _ = self._described(name)
        try:
            layout = self._metadata.layouts({stored: None})[stored]
        except EnvironmentProblem as error:
            raise DamagedCheckpoint(self.folder, error.message) from error
        # The pieces are looked up before the whole is allocated: a lying shape costs nothing.
        pieces = [
            self._files.read(chunk.file, chunk.key, layout.dtype, chunk.shape)
            for chunk in layout.chunks
            if math.prod(chunk.shape)
        ]
        if len(pieces) == 1:
            return pieces[0]
        whole = self._empty(layout.shape, TORCH_DTYPE[layout.dtype])

        def put_in(chunk: Chunk, piece: Tensor) -> None:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))
            whole[box] = piece

        filled = [chunk for chunk in layout.chunks if math.prod(chunk.shape)]
        with ThreadPoolExecutor(2) as pool:  # one thread does not read a file as fast as it could be
            list(pool.map(put_in, filled, pieces))
        return whole

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._room is None:
            return torch.empty(shape, dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        if self._room.numel() < size:
            self._room = torch.empty(0, dtype=torch.uint8)  # never both
            self._room = torch.empty(size, dtype=torch.uint8)
        return self._room[:size].view(dtype).view(shape)

    def _described(self, name: str) -> tuple[str, Described]:
        if name not in self._tensors:
            raise TitanError(f"checkpoint {self.folder} has no tensor {name!r}")
        return self._tensors[name]
