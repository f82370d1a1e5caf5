"""Safetensors files as streams: the header is written first, from shapes, then each tensor's bytes.

The official library writes a file only from tensors that are all in memory. This module writes and checks the
same format (https://github.com/huggingface/safetensors, "Format") with memory for one tensor. It handles
bytes only and does not import torch; `titancli.checkpoint.format.tensors` makes tensors from them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

from titancli.checkpoint.format.hashed import Digest, HashedWriter, Pieces, checksum
from titancli.errors import EnvironmentProblem, TitanError
from titancli.files import regular

ITEM_SIZE = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element, by the format's type names."""

PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of types that a header may contain too, but that cannot be read as tensors here."""

SHARD_BYTES = 5 * 10**9
"""A file is split when its data would exceed this size; a tensor is never split over files."""

HEADER_LIMIT = 100_000_000
"""The format's own limit on the header, in bytes."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    key: str
    dtype: str
    """The dtype: a key of ITEM_SIZE or PACKED_BITS."""
    shape: tuple[int, ...]
    start: int = 0
    """Offset of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        bits = PACKED_BITS.get(self.dtype) or 8 * ITEM_SIZE[self.dtype]
        return math.prod(self.shape) * bits // 8


def split(sizes: Sequence[int], limit: int | None = None) -> list[range]:
    """Cut a sequence of sizes (bytes) into consecutive ranges of at most `limit` bytes, or one element."""
    limit = SHARD_BYTES if limit is None else limit
    parts, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            parts.append(range(first, index))
            first, total = index, 0
        total += size
    return [*parts, range(first, len(sizes))] if sizes else []


class TensorFileWriter:
    """Writes one file: `write` each entry's bytes in order, then `close`. A context manager.

    Raises:
        OSError: the disk refuses; the caller knows what it is saving and explains it.
        TitanError: two entries have the same key, or the bytes written do not match an entry.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self._path = path
        self._sizes = iter([entry.nbytes for entry in entries])
        self._pieces: list[Pieces] = []
        header = _header(path, entries)
        self.header = Digest(len(header), checksum(header))
        """Digest of everything before the first tensor."""
        starts = accumulate((entry.nbytes for entry in entries), initial=len(header))
        self.entries = [replace(entry, start=start) for entry, start in zip(entries, starts, strict=False)]
        """The given entries, with their offsets in the file."""
        self._file = HashedWriter(path)
        try:
            self._file.write(header)
        except BaseException:
            self._file.close()
            raise

    def write(self, data: memoryview) -> None:
        """Write the next entry's bytes: contiguous, little-endian, row-major; unchanged until `close`
        returns."""
        if data.nbytes != next(self._sizes, -1):
            raise TitanError(f"{self._path}: a tensor does not have the size given in the header")
        self._file.write(data, self._next())

    def write_pieces(self, pieces: Iterable[memoryview]) -> None:
        """Write the next entry's bytes, each piece before the next is requested."""
        end = self._file.size + next(self._sizes, -1)
        hashes = self._next()
        for piece in pieces:
            if self._file.size + piece.nbytes > end:
                break
            self._file.write(piece, hashes)
            self._file.settle()  # the same memory may hold the next piece
        else:
            if self._file.size == end:
                return
        raise TitanError(f"{self._path}: a tensor does not have the size given in the header")

    def close(self) -> Digest:
        """Flush the file to the disk itself, and return its digest."""
        if next(self._sizes, None) is not None:
            raise TitanError(f"{self._path}: fewer tensors were written than the header lists")
        return self._file.finish()

    def checksums(self) -> list[tuple[str, ...]]:
        """Return the checksums of each entry's pieces of `hashed.PIECE` bytes, once the file is closed."""
        return [pieces.hexdigests() for pieces in self._pieces]

    def _next(self) -> Pieces:
        self._pieces.append(Pieces())
        return self._pieces[-1]

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _header(path: Path, entries: Sequence[Entry]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        if entry.key in table:
            raise TitanError(f"{path}: two tensors have the name {entry.key!r}")
        end = position + entry.nbytes
        table[entry.key] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> dict[str, Entry]:
    """Return the entries of a file, checked against its size: in bounds, without holes or overlaps.

    Raises:
        EnvironmentProblem: it is not a readable, whole safetensors file.
    """
    try:
        size = path.stat().st_size
        # A path in an object store opens itself.
        with open(path, "rb", opener=regular) if isinstance(path, os.PathLike) else path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise EnvironmentProblem(
                    f"{path} is a pointer of Git LFS, not the file itself",
                    hint="run git lfs pull in that folder, or download it with titan download",
                )
            if size < 8 or length > min(HEADER_LIMIT, size - 8):
                raise EnvironmentProblem(f"{path} is not a complete safetensors file: its header is cut off")
            table = json.loads(file.read(length))
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} is not a safetensors file: its header is not JSON") from error
    try:
        entries = [_entry(key, row, 8 + length) for key, row in table.items() if key != "__metadata__"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnvironmentProblem(
            f"{path} is not a safetensors file: its header is malformed ({error})"
        ) from error
    position = 8 + length
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != position:
            raise EnvironmentProblem(
                f"{path}: the data of {entry.key!r} overlaps that of another tensor, or leaves a gap"
            )
        position += entry.nbytes
    if position != size:
        raise EnvironmentProblem(f"{path} is {size} bytes long, but its header requires {position}")
    return {entry.key: entry for entry in entries}


def _entry(key: str, row: dict[str, Any], base: int) -> Entry:
    start, stop = natural(row["data_offsets"])
    if row["dtype"] not in ITEM_SIZE and row["dtype"] not in PACKED_BITS:
        raise ValueError(f"unknown dtype {row['dtype']!r}")
    entry = Entry(key, row["dtype"], natural(row["shape"]), base + start)
    if stop - start != entry.nbytes:
        raise ValueError(f"{key!r} has {stop - start} bytes, but its shape requires {entry.nbytes}")
    return entry


def natural(values: Any) -> tuple[int, ...]:
    """Return a JSON list of non-negative integers as a tuple.

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} is not a list of non-negative integers")
    return tuple(values)
