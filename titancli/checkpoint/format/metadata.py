"""`metadata.json` and its parts: where each tensor's pieces lie; a rank reads only what it needs. Torch-free.

`metadata.json`, the index, says which ranks wrote which boxes of which tensors. Tensors of the same dtype,
shape and layout form one group, so the index stays small however many ranks there are. A rank's part,
`metadata-RANK.json.gz`, holds the positions of its boxes in its files, and their checksums.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

from titancli.checkpoint.format.files import read_file
from titancli.checkpoint.format.hashed import PIECE, Digest, checksum
from titancli.checkpoint.format.layout import (
    FILE_NAME,
    Box,
    Chunk,
    TensorLayout,
    chunk_from,
    common,
    described,
    tile,
)
from titancli.errors import EnvironmentProblem

METADATA = "metadata.json"
PART_NAME = re.compile(r"metadata-(\d{5,9})\.json\.gz\Z")
FORMAT = 2
LIMIT = 1 << 32
"""Maximum size of `metadata.json` in bytes."""
PART_LIMIT = 1 << 30
"""Maximum size of an unpacked part in bytes."""
CELLS_LIMIT = 1 << 22
"""Maximum number of boxes in all groups, enough for 65,000 ranks. A few bytes may claim any number of them.
"""
_READERS = 8
"""Number of parts that are read at once."""


class Cell(NamedTuple):
    """A box of the tensors of a group, and the rank that wrote it."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Tensors with the same layout."""

    dtype: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    columns: tuple[Any, ...]
    """The ranks, offsets and sizes of its cells, packed; one column for each number."""

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int], tensors: Iterable[str], cells: Sequence[Cell]) -> Group:
        rows = [(cell.rank, *cell.offsets, *cell.sizes) for cell in cells]
        columns = zip(*rows, strict=True) if rows else [()] * (1 + 2 * len(shape))
        return cls(dtype, tuple(shape), tuple(tensors), tuple(_packed(column) for column in columns))

    @cached_property
    def count(self) -> int:
        """Return the number of boxes.

        Raises:
            TypeError, ValueError: its columns are malformed.
        """
        for run in chain.from_iterable(self.columns):
            if not isinstance(run, list) or [type(number) for number in run] != [int, int] or run[1] < 1:
                raise ValueError(f"{run!r} is not a run of numbers")
        counts = {sum(count for _, count in column) for column in self.columns}
        if len(counts) != 1:
            raise ValueError("a group whose columns are not of one length")
        return counts.pop()

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Return the boxes.

        Raises:
            ValueError: the columns are malformed.
        """
        columns, dims = [_unpacked(column) for column in self.columns], len(self.shape)
        return tuple(Cell(row[0], row[1 : 1 + dims], row[1 + dims :]) for row in zip(*columns, strict=True))


def _packed(values: Iterable[int]) -> list[list[int]]:
    """Pack numbers as runs: each a difference from the number before, and how often it repeats."""
    runs: list[list[int]] = []
    before = 0
    for value in values:
        if runs and runs[-1][0] == value - before:
            runs[-1][1] += 1
        else:
            runs.append([value - before, 1])
        before = value
    return runs


def _unpacked(runs: Iterable[Sequence[int]]) -> list[int]:
    values = list(accumulate(chain.from_iterable(repeat(step, count) for step, count in runs)))
    if any(value < 0 for value in values):
        raise ValueError("a negative rank, offset or size")
    return values


# -------------------------------------------------------------------------------------------------- writing


def part_name(rank: int) -> str:
    return f"metadata-{rank:05d}.json.gz"


def index_bytes(groups: Iterable[Group]) -> bytes:
    """Return the bytes of `metadata.json`."""
    rows = []
    for group in groups:
        dims, (ranks, *boxes) = len(group.shape), group.columns
        row = {"dtype": group.dtype, "shape": group.shape, "tensors": group.tensors, "ranks": ranks}
        rows.append(json.dumps({**row, "offsets": boxes[:dims], "sizes": boxes[dims:]}))
    lines = ",\n".join(rows)
    return f'{{"format": {FORMAT}, "groups": [\n{lines}\n]}}\n'.encode()


def part_bytes(chunks: Mapping[str, Sequence[Chunk]], headers: Mapping[str, Digest]) -> bytes:
    """Return the bytes of a rank's part: its chunks of each tensor, and the digests of its data files'
    headers."""
    tensors = {
        name: [
            {
                "offsets": chunk.offsets,
                "shape": chunk.shape,
                "file": chunk.file,
                "key": chunk.key,
                "start": chunk.start,
                "xxh3_64": chunk.checksums,
            }
            for chunk in found
        ]
        for name, found in chunks.items()
    }
    table = {name: [header.size, header.xxh3_64] for name, header in headers.items()}
    text = json.dumps({"format": FORMAT, "piece": PIECE, "headers": table, "tensors": tensors})
    return gzip.compress(text.encode(), 6, mtime=0)


# -------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Part:
    rows: dict[str, Any]
    piece: int
    headers: dict[str, Digest]
    chunks: dict[str, dict[Box, Chunk]] = field(default_factory=dict)
    """The chunks looked up so far, by name and box."""


class Described(NamedTuple):
    """The dtype and shape of a tensor that has not been looked up yet."""

    dtype: str
    shape: tuple[int, ...]


class Metadata:
    """The contents of a checkpoint; positions are looked up on request.

    Raises:
        EnvironmentProblem: a file is missing, damaged or malformed; names it.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Digest] | None,
        groups: Iterable[Group],
    ) -> None:
        """Create the metadata.

        Args:
            files: the files of the manifest; None: the manifest is not used.
        """
        self._folder, self._files = folder, files
        self._groups: dict[str, tuple[Group, ...]] = {}
        tensors: dict[str, Described] = {}
        for group in groups:
            for name in group.tensors:
                found = tensors.setdefault(name, Described(group.dtype, group.shape))
                if found != (group.dtype, group.shape):
                    raise ValueError(f"{name!r} has two dtypes or shapes")
                self._groups[name] = (*self._groups.get(name, ()), group)
        self.tensors = {name: tensors[name] for name in sorted(tensors, key=by_numbers)}
        self._parts: dict[int, _Part] = {}
        self._found: dict[Any, list[Cell]] = {}
        self._crossed: dict[Any, bool] = {}

    def layouts(self, wanted: Mapping[str, Sequence[Box] | None]) -> dict[str, TensorLayout]:
        """Return where the wanted boxes of each tensor lie; None: the whole tensor."""
        cells = self._cells_of(wanted)
        ranks = _writers(cells) - self._parts.keys()
        with ThreadPoolExecutor(_READERS) as pool:
            self._parts |= zip(sorted(ranks), pool.map(self._read_part, sorted(ranks)), strict=True)
        return {
            name: TensorLayout(*self.tensors[name], tuple(self._chunk(name, cell) for cell in found))
            for name, found in cells.items()
        }

    def crosses(self, name: str, dim: int, bounds: tuple[int, ...]) -> bool:
        """Return whether a stored box of a tensor crosses one of the bounds along a dimension."""
        groups = self._groups[name]
        key = (*map(id, groups), dim, bounds)
        if key not in self._crossed:
            try:
                spans = {(c.offsets[dim], c.offsets[dim] + c.sizes[dim]) for g in groups for c in g.cells}
            except ValueError as error:
                raise EnvironmentProblem(f"{self._folder / METADATA} is malformed: {error}") from error
            self._crossed[key] = any(low < bound < high for low, high in spans for bound in bounds)
        return self._crossed[key]

    def parts(self, wanted: Mapping[str, Sequence[Box] | None]) -> list[str]:
        """Return the files that `layouts` will read."""
        return [part_name(rank) for rank in sorted(_writers(self._cells_of(wanted)))]

    def everything(self) -> dict[str, TensorLayout]:
        """Return where all of each tensor lies."""
        return self.layouts(dict.fromkeys(self.tensors))

    def headers(self, place: int = 0, count: int = 1) -> dict[str, Digest]:
        """Return the digests of data files' headers: of all, or of the share of rank `place` of `count`."""
        names = [PART_NAME.match(name) for name in sorted(self._files or ())]
        ranks = [int(match[1]) for match in names if match][place::count]
        parts = [self._parts.get(rank) or self._read_part(rank) for rank in ranks]
        return {name: header for part in parts for name, header in part.headers.items()}

    @cached_property
    def _pieces(self) -> int | None:
        """Return the maximum number of pieces in all data files; None: there is no manifest."""
        data = (digest.size for name, digest in (self._files or {}).items() if FILE_NAME.match(name))
        return None if self._files is None else sum(-(-size // PIECE) for size in data)

    def _cells_of(self, wanted: Mapping[str, Sequence[Box] | None]) -> dict[str, list[Cell]]:
        try:
            return {name: self._cells(name, boxes) for name, boxes in wanted.items()}
        except ValueError as error:
            raise EnvironmentProblem(f"{self._folder / METADATA} is malformed: {error}") from error

    def _cells(self, name: str, boxes: Sequence[Box] | None) -> list[Cell]:
        """Return the cells that intersect a tensor's boxes, checked to cover them."""
        groups, shape = self._groups[name], self.tensors[name].shape
        wanted = [((0,) * len(shape), shape)] if boxes is None else boxes
        key = (*map(id, groups), *wanted)  # tensors with the same layout are wanted in the same boxes
        if key not in self._found:
            cells = [cell for group in groups for cell in group.cells]
            found: dict[Cell, Box] = {}
            for box in wanted:
                inside = {c: both for c in cells if (both := common(c.offsets, c.sizes, box))}
                if 0 not in box[1] and not tile(box[1], inside.values()):
                    raise ValueError(f"the boxes of {name!r}, {list(shape)}, overlap or leave gaps")
                found |= inside
            self._found[key] = list(found)
        return self._found[key]

    def _read_part(self, rank: int) -> _Part:
        path = self._folder / part_name(rank)
        data = read_checked(path, PART_LIMIT, self._files)
        limit, most = PART_LIMIT, None
        if self._pieces is not None:
            # Checksums of zeros compress without end, so their size is computed from the data alone. Of the
            # rest a byte holds at most 23 characters, and 1.3 values.
            limit = min(limit, (1 << 20) + 32 * self._pieces + 64 * len(data))
            most = (1 << 14) + 2 * self._pieces + 4 * len(data)
        try:
            unpack = zlib.decompressobj(31)
            text = unpack.decompress(data, limit)
            if most is not None and sum(map(text.count, (b",", b"[", b"{"))) > most:
                raise ValueError("it has more values than its data can have")  # each takes memory
            table = json.loads(text)
            headers = {name: Digest(size, digest) for name, (size, digest) in table["headers"].items()}
            if (
                table["format"] != FORMAT
                or type(table["piece"]) is not int
                or table["piece"] < 1
                or table["piece"] % 8
            ):
                raise ValueError("it is of another format")
            if not unpack.eof or any(type(header.size) is not int for header in headers.values()):
                raise ValueError("it is cut off, or too large")
            return _Part(dict(table["tensors"]), table["piece"], headers)
        except (AttributeError, KeyError, TypeError, ValueError, zlib.error, RecursionError) as error:
            raise EnvironmentProblem(f"{path} is malformed: {error}") from error

    def _chunk(self, name: str, cell: Cell) -> Chunk:
        part, path = self._parts[cell.rank], self._folder / part_name(cell.rank)
        dtype, shape = self.tensors[name]
        try:
            if name not in part.chunks:
                found = (chunk_from(row, dtype, shape, piece=part.piece) for row in part.rows[name])
                part.chunks[name] = {(chunk.offsets, chunk.shape): chunk for chunk in found}
            chunk = part.chunks[name].get((cell.offsets, cell.sizes))
            if chunk is None:
                raise ValueError(f"it has no chunk of {name!r} at {list(cell.offsets)}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EnvironmentProblem(f"{path} is malformed: {error}") from error
        if self._files is not None and chunk.file not in self._files:
            raise EnvironmentProblem(f"{path} names {chunk.file}, which is missing")
        return chunk


def _writers(cells: Mapping[str, Iterable[Cell]]) -> set[int]:
    return {cell.rank for found in cells.values() for cell in found}


def by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def open_metadata(folder: Path, files: Mapping[str, Digest] | None = None) -> Metadata:
    """Read and check a checkpoint's `metadata.json`.

    Args:
        files: the files of the manifest, to verify what is read.

    Raises:
        EnvironmentProblem: it is missing, damaged, or not in a format that this version reads.
    """
    path = folder / METADATA
    try:
        data = json.loads(read_checked(path, LIMIT, files))
    except (ValueError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} is damaged: it is not JSON") from error
    try:
        if data["format"] != FORMAT:
            raise EnvironmentProblem(
                f"{path} has format {data['format']!r}, but this version of titan reads format {FORMAT}",
                hint="use the version of titan that wrote it (manifest.json names it)",
            )
        groups = [_group(row) for row in data["groups"]]
        if sum(group.count for group in groups) > CELLS_LIMIT:
            raise ValueError(f"it has more than {CELLS_LIMIT} boxes")
        if files is not None:
            parts = sum(digest.size for name, digest in files.items() if PART_NAME.match(name))
            if (
                sum(group.count * len(group.tensors) for group in groups) > parts
            ):  # one row each, in some part
                raise ValueError("it has more boxes than its parts have bytes")
        return Metadata(folder, files, groups)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnvironmentProblem(f"{path} is malformed: {error}") from error


def _group(row: dict[str, Any]) -> Group:
    dtype, shape = described(row)
    names, columns = row["tensors"], (row["ranks"], *row["offsets"], *row["sizes"])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("names of tensors that are none")
    if len(row["offsets"]) != len(shape) or len(row["sizes"]) != len(shape):
        raise ValueError(f"boxes of other dimensions than a tensor of shape {list(shape)}")
    return Group(dtype, shape, tuple(names), columns)


def read_checked(path: Path, limit: int, files: Mapping[str, Digest] | None) -> bytes:
    """Return a file's bytes, verified against the manifest's `files` if given.

    Raises:
        EnvironmentProblem: they cannot be read, or differ.
    """
    try:
        data = read_file(path, limit)
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error
    if files is not None and (path.name not in files or checksum(data) != files[path.name].xxh3_64):
        raise EnvironmentProblem(f"{path} is damaged: its checksum does not match")
    return data
