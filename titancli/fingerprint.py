"""Fingerprints of files by their names, sizes and contents. Torch-free."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import IO, BinaryIO

import xxhash

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
WHOLE_BYTES = 256 << 20
"""Up to so much in all, every byte counts; beyond, names, sizes, and both ends of files."""
END_BYTES = 64 << 10
CHUNK_BYTES = 64 << 20
"""Bytes that one checksum of `chunk_sums` covers."""
SUM_DIGITS = 16
"""Hexadecimal digits of one."""
NOT_KEPT = "checksums cannot be kept in %s (%s): files are read again at each start"


class Contents(str):
    """A digest of every byte of data that had a weaker fingerprint before."""

    ends: str
    """The weaker fingerprint; checkpoints may contain it."""


def fingerprint(
    files: Sequence[tuple[str, str, int]],
    checked: Callable[[str, Iterable[bytes]], Iterable[bytes]] = lambda path, blocks: blocks,
) -> str:
    """Return xxh3-128 over files, each a path, a name and a size in bytes.

    `checked` is given the path and the bytes of each file that is read whole, and passes them on.

    Raises:
        OSError: a file cannot be read; `filename` says which.
    """
    digest = xxhash.xxh3_128()
    whole = sum(size for _, _, size in files) <= WHOLE_BYTES
    for path, name, size in files:
        digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
        try:
            with open(path, "rb") as file:
                for block in checked(path, _blocks(file)) if whole else ends_of(file, size):
                    digest.update(block)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
    return digest.hexdigest()


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    check = full_check()
    while block := file.read(BLOCK_BYTES):
        if check is not None:
            check.count(file.name, len(block))
        yield block


class FullCheck:
    """While it is entered, every byte is read again, whatever sizes and times of change say."""

    def __init__(self, report: Callable[[int], None] = lambda read: None) -> None:
        """`report` is given the bytes that were read so far."""
        self.files: set[str] = set()
        self.bytes = self.compared = 0
        """The number of bytes read, and of files compared with earlier checksums."""
        self.faults: list[str] = []
        self.left_out: list[str] = []
        """Data that are not read."""
        self._report = report

    def __enter__(self) -> FullCheck:
        self._token = _FULL.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _FULL.reset(self._token)

    def count(self, path: str, size: int) -> None:
        self.files.add(path)
        self.bytes += size
        self._report(self.bytes)

    def compare(self, path: str, before: str, sums: str) -> None:
        """Compare the sums of a seemingly unchanged file with the earlier ones."""
        self.compared += 1
        if before != sums:
            byte = first_difference(before, sums)
            self.faults.append(
                f"{path}: from byte {byte:,} on it is not what it was when it was read last, though its size "
                "and its time of change are the same"
            )


_FULL: ContextVar[FullCheck | None] = ContextVar("full_check", default=None)


def full_check() -> FullCheck | None:
    """Return the check that is under way, if there is one."""
    return _FULL.get()


def first_difference(sums: str, found: str) -> int:
    """Return the first byte of the first chunk whose sum differs."""
    same = 0
    while same < len(sums) and sums[same : same + SUM_DIGITS] == found[same : same + SUM_DIGITS]:
        same += SUM_DIGITS
    return same // SUM_DIGITS * CHUNK_BYTES


def ends_of(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the first and the last 64 KiB of a file."""
    yield file.read(END_BYTES)
    file.seek(max(0, size - END_BYTES))
    yield file.read(END_BYTES)


def corpus_fingerprint(
    files: Sequence[tuple[str, str, int]],
    checked: Callable[[str, Iterable[bytes]], Iterable[bytes]] = lambda path, blocks: blocks,
) -> str:
    """Return a digest of every byte of files of any size; above 256 MiB a `Contents`, from `chunk_sums`.

    Raises:
        OSError: a file cannot be read; `filename` says which.
    """
    if sum(size for _, _, size in files) <= WHOLE_BYTES:
        return fingerprint(files, checked)
    digest = xxhash.xxh3_128()
    for path, name, size in files:
        sums = chunk_sums(path)
        digest.update(f"{name}\0{size}\0{sums}\0".encode(errors="surrogateescape"))
    contents = Contents(f"merkle:{digest.hexdigest()}")
    contents.ends = fingerprint(files)
    return contents


def chunk_sums(path: str) -> str:
    """Return the xxh3-64 of each 64 MiB of a file, 16 hexadecimal digits each.

    They are computed once and kept in the cache until the size or the modification time of the file changes.

    Raises:
        OSError: the file cannot be read; `filename` says which.
    """
    entry = cache_folder() / "checksums" / f"{cache_name(path)}.json"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        file = open(entry, "a+", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        logger.warning(NOT_KEPT, entry, error)
        return file_sums(path)
    with file:
        lock_if_possible(file)
        status = os.stat(path)
        now = [status.st_size, status.st_mtime_ns]
        kept = _kept(file)
        known = kept[1] if kept is not None and kept[0] == now else None
        check = full_check()
        if known is not None and check is None:
            return known
        sums = file_sums(path)
        if known is not None and check is not None:
            check.compare(path, known, sums)
        try:
            file.truncate(0)
            os.write(file.fileno(), json.dumps([now, sums, os.path.realpath(path)]).encode())
        except OSError as error:
            logger.warning(NOT_KEPT, entry, error)
        return sums


def lock_if_possible(file: IO[str]) -> bool:
    """Lock a file of the cache: of the ranks of a machine one reads the data, the others wait. Return whether
    that worked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        logger.debug("%s cannot be locked: %s", file.name, error)  # then each of them reads them
        return False
    return True


def cache_folder() -> Path:
    """Return the folder of data that titan can recompute: TITAN_CACHE, or `titan` in the user's cache."""
    own = os.environ.get("TITAN_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan"


def cache_name(path: str) -> str:
    """Return the cache key of a file."""
    return xxhash.xxh3_128_hexdigest(os.fsencode(os.path.realpath(path)))


def _kept(file: IO[str]) -> tuple[list[int], str] | None:
    file.seek(0)
    try:
        now, sums, _ = json.load(file)
    except ValueError:  # new, or written in part
        return None
    return now, sums


class ChunkSums:
    """The xxh3-64 of each 64 MiB of bytes that are given one after another."""

    def __init__(self, before: str = "") -> None:
        """`before`: the sums of whole chunks that were given earlier."""
        self._whole, self._digest, self._length = [before], xxhash.xxh3_64(), 0

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: CHUNK_BYTES - self._length]
            self._digest.update(part)
            self._length += len(part)
            view = view[len(part) :]
            if self._length == CHUNK_BYTES:
                self._whole.append(self._digest.hexdigest())
                self._digest, self._length = xxhash.xxh3_64(), 0

    @property
    def whole(self) -> str:
        """The sums of the chunks that are complete."""
        return "".join(self._whole)

    @property
    def all(self) -> str:
        """Return the sums of all chunks, including the last, incomplete one."""
        return self.whole + (self._digest.hexdigest() if self._length else "")


def file_sums(path: str) -> str:
    """Return what `chunk_sums` does, from the file itself.

    Raises:
        OSError: the file cannot be read, or changed while it was.
    """
    sums, before = ChunkSums(), os.stat(path)
    with open(path, "rb") as file:
        for block in _blocks(file):
            sums.update(block)
    after = os.stat(path)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise OSError(0, "it changed while it was read", path)
    return sums.all
