"""Files of rows that are not plain JSON Lines, written as such into titan's cache, once.

A list in JSON, a table of separated values, a Parquet file and a compressed file cannot be read from any row
on. So that rows of every kind have exact positions and can be shuffled, `lines_of` converts such a file: one
line for each row, in its order. Beside the lines lie their size and checksums: lines that do not match them
are written again.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn

import xxhash

from titancli.data.compressed import RESTORE, Damaged, largest, open_plain, too_large, unreadable
from titancli.data.files import TextFile
from titancli.data.formats import delimiter_of
from titancli.data.parquet_file import open_parquet, written_out
from titancli.data.unchanged import require_unchanged
from titancli.errors import EnvironmentProblem
from titancli.files import read_json
from titancli.fingerprint import (
    ChunkSums,
    cache_folder,
    cache_name,
    chunk_sums,
    ends_of,
    lock_if_possible,
)

logger = logging.getLogger(__name__)

BLOCK = 1 << 20
ROWS = 1024
"""Rows of a Parquet file that are read at a time."""
LONGEST = 1 << 25
"""Characters of a row: one is held at a time."""
MOST_LINES = 1 << 20
"""Lines of a row of a table; empty ones take time too."""
SUMS = ".sums"
"""Suffix of the file with the size and the checksums of lines."""


def lines_of(file: TextFile, kind: str) -> str:
    """Return the path of a file's rows as JSON Lines, in titan's cache; write it if it is not there yet.

    Of all processes that request the same file, one writes and the others wait.

    Args:
        kind: the file's format, a key of `titancli.data.formats.READ`.

    Raises:
        EnvironmentProblem: the file is damaged, cannot be read or has changed, or the cache cannot be
            written.
    """
    folder, name = cache_folder() / "lines", cache_name(file.path)
    try:
        with open(file.path, "rb") as opened:
            ends = b"".join(ends_of(opened, file.size))
    except OSError as error:
        unreadable(file.path, error)
    state = xxhash.xxh3_64_hexdigest(f"{kind}:{file.size}:{file.modified}:".encode() + ends)
    target = folder / f"{name}-{state}.jsonl"
    if _is_intact(target):
        return str(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / f"{name}.lock", "a")  # noqa: SIM115 - closed below
    except OSError as error:
        _not_written(file, target, error)
    with lock:
        locked = lock_if_possible(lock)
        if not _is_intact(target):
            if target.is_file():
                logger.warning("%s is damaged, and is written again", target)
            for old in folder.glob(f"{name}-*"):  # of earlier contents, or left by a process that was killed
                if locked or old.suffix != ".part":
                    old.unlink(missing_ok=True)
            logger.info("reading the rows of %s, once; they are kept in %s", file.path, target)
            _write(file, kind, target)
    return str(target)


def _is_intact(target: Path) -> bool:
    """Return whether lines are there as they were written. Their bytes are read at the first use, and again
    when their size or their time of change differs."""
    try:
        size, sums = read_json(target.with_suffix(SUMS))
        return size == target.stat().st_size and sums == chunk_sums(str(target))
    except (OSError, ValueError, TypeError):  # one of the two is missing, or was cut
        return False


def _write(file: TextFile, kind: str, target: Path) -> None:
    """Write lines and, before they have their name, their size and checksums."""
    part, sums = target.with_suffix(f".{os.getpid()}.part"), ChunkSums()
    try:
        with open(part, "wb") as out:
            for block in read_rows(file, kind):
                out.write(block)
                sums.update(block)
            _to_disk(out)
            size = out.tell()
        with open(target.with_suffix(SUMS), "w", encoding="utf-8") as record:
            json.dump([size, sums.all], record)
            _to_disk(record)
        os.replace(part, target)
    except OSError as error:
        target.with_suffix(SUMS).unlink(missing_ok=True)
        _not_written(file, target, error)
    finally:
        part.unlink(missing_ok=True)


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _not_written(file: TextFile, target: Path, error: OSError) -> NoReturn:
    raise EnvironmentProblem(
        f"the rows of {file.path} cannot be written to {target}: {error.strerror or error}",
        hint="set TITAN_CACHE to a folder that can be written and has room, or convert it to JSON Lines",
    ) from error


def read_rows(file: TextFile, kind: str) -> Iterator[bytes]:
    """Yield the rows of a file as lines of JSON; of JSON Lines, blocks of them as they are.

    Raises:
        EnvironmentProblem: the file is damaged, cannot be read or has changed.
    """
    path = file.path
    try:
        yield from map(_line, _parquet(path)) if kind == "parquet" else _plain(path, kind)
        require_unchanged(path, file.stamp)
    except OSError as error:
        unreadable(path, error)
    except UnicodeDecodeError as error:
        _damaged(path, f"it is not UTF-8: byte 0x{error.object[error.start]:02x} is invalid")
    except (csv.Error, ValueError, RecursionError) as error:  # Arrow's errors are ValueErrors too
        _damaged(path, next(iter(str(error).splitlines()), type(error).__name__))


def _damaged(path: str, reason: str) -> NoReturn:
    raise Damaged(f"{path} is damaged: {reason}", hint=RESTORE) from None


def _plain(path: str, kind: str) -> Iterator[bytes]:
    with open_plain(path) as file:
        if kind == "json":
            yield from map(_line, _items(io.TextIOWrapper(file, encoding="utf-8-sig")))
        elif kind == "csv":
            yield from map(_line, _table(file))
        else:
            while block := file.read(BLOCK):
                yield block


def _line(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False, default=str).encode(errors="surrogatepass") + b"\n"


def _items(text: io.TextIOWrapper) -> Iterator[Any]:
    """Yield the items of a list in JSON, holding one at a time.

    Raises:
        ValueError: it is not a list, or ends within an item.
    """
    decoder, held, began = json.JSONDecoder(), "", False
    size = BLOCK
    while True:
        block = text.read(size)
        held = (held + block).lstrip()
        if not began and held:
            if held[0] != "[":
                raise ValueError("it is not a list in JSON")
            held, began = held[1:].lstrip(), True
        while held and held[0] != "]":
            try:
                item, end = decoder.raw_decode(held)
            except json.JSONDecodeError as error:
                if not block:
                    raise ValueError(f"it ends within a list, or an item is not JSON: {error.msg}") from error
                _require_short(len(held))
                size = max(BLOCK, len(held))  # so that a long item is not decoded again and again
                break
            rest = held[end:].lstrip()
            if not rest and block:
                break  # what follows may belong to it
            yield item
            if rest[:1] not in (",", "]"):
                raise ValueError("a comma is missing between items, or the list has no end")
            held, size = (rest[1:].lstrip() if rest[0] == "," else rest), BLOCK
        if held.startswith("]"):
            return
        if not block:
            raise ValueError("the list has no end")


def _table(file: BinaryIO) -> Iterator[Any]:
    """Yield the rows of a table of separated values, by its first row; of another width, as a list."""
    csv.field_size_limit(sys.maxsize)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    lines = _Lines(text)
    first = next(lines, "")
    header = next(csv.reader([first], delimiter=(mark := delimiter_of(first)), strict=True), [])
    if len(set(header)) < len(header):
        raise ValueError(f"two columns are called {max(header, key=header.count)!r}")
    for cells in csv.reader(lines, delimiter=mark, strict=True):
        lines.begin_row()
        if cells:
            yield dict(zip(header, cells, strict=True)) if len(cells) == len(header) else cells


class _Lines:
    """The lines of a text; those of one row, which may have several, are at most `MOST_LINES`, and have at
    most `LONGEST` characters."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self.begin_row()

    def begin_row(self) -> None:
        """Take note that a row has been read."""
        self._lines = self._length = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if not (line := self._text.readline(LONGEST + 1)):
            raise StopIteration
        self._lines, self._length = self._lines + 1, self._length + len(line)
        _require_short(self._length)
        if self._lines > MOST_LINES:
            raise ValueError(f"a row has more than {MOST_LINES:,} lines")
        return line


def _require_short(length: int) -> None:
    if length > LONGEST:
        raise ValueError(f"a row has more than {LONGEST:,} characters")


def _parquet(path: str) -> Iterator[Any]:
    limit, total = largest(os.path.getsize(path)), 0
    with open_parquet(path) as file:
        for batch in file.iter_batches(ROWS, columns=_shown(file.schema_arrow)):
            size = written_out(batch)
            if (total := total + size) > limit:
                raise too_large(path, limit)
            for part in [batch] if size <= LONGEST else (batch.slice(row, 1) for row in range(len(batch))):
                _require_short(min(size, written_out(part)))
                yield from map(without_nulls, part.to_pylist())


def _shown(schema: Any) -> list[str]:
    """Return the columns that are no bytes, such as images."""
    import pyarrow as pa

    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return [one.name for one in schema if not any(check(one.type) for check in binary)]


def without_nulls(value: Any) -> Any:
    """Return a value of a table without the keys that are null, as every key is that only other rows have."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
