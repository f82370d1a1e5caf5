"""The byte offsets of the rows of JSON Lines files: found by reading a file once, and cached."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import xxhash

from titancli.data.compressed import unreadable
from titancli.data.files import TextFile
from titancli.data.unchanged import require_unchanged
from titancli.fingerprint import cache_folder, cache_name, ends_of, lock_if_possible

logger = logging.getLogger(__name__)

BLOCK = 1 << 24
KEPT_BYTES = 64 << 20
"""Minimum size of files whose index is cached; smaller ones are read at each start."""
FACTS = 4
"""Numbers before the offsets: the file's size and time of change, a hash of its two ends, and one of the
offsets."""


def row_starts(file: TextFile) -> np.ndarray:
    """Return the byte at which each row of a file begins, int64; memory-mapped from titan's cache for large
    files.

    Raises:
        EnvironmentProblem: the file cannot be read.
    """
    try:
        starts = _row_starts(file)
        require_unchanged(file.path, file.stamp)
        return starts
    except OSError as error:
        unreadable(file.path, error)


def _row_starts(file: TextFile) -> np.ndarray:
    if os.stat(file.path).st_size < KEPT_BYTES:
        return _found(file.path)
    entry = cache_folder() / "rows" / f"{cache_name(file.path)}.npy"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = open(entry.with_suffix(".lock"), "a")  # noqa: SIM115 - closed below
    except OSError as error:
        logger.warning("an index cannot be kept in %s (%s): files are read at each start", entry, error)
        return _found(file.path)
    with lock:
        lock_if_possible(lock)
        return _kept(entry, file.path)


def _kept(entry: Path, path: str) -> np.ndarray:
    """Return the cached index if it is of the file's current state; otherwise build and cache it."""
    facts = _facts(path)
    try:
        kept = np.load(entry, mmap_mode="r")
        if kept.dtype == np.int64 and kept[:FACTS].tolist() == [*facts, _hash(kept[FACTS:])]:
            return kept[FACTS:]
    except FileNotFoundError:
        pass  # the first time
    except (OSError, ValueError, EOFError) as error:  # EOFError: it is empty
        logger.warning("%s is read again: %s cannot be read: %s", path, entry, error)
    starts = _found(path)
    part = entry.with_suffix(f".{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            np.save(file, np.concatenate((np.array([*facts, _hash(starts)], np.int64), starts)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, entry)
    except OSError as error:
        part.unlink(missing_ok=True)
        logger.warning("an index cannot be kept in %s (%s): files are read at each start", entry, error)
    return starts


def _facts(path: str) -> list[int]:
    status = os.stat(path)
    with open(path, "rb") as file:
        sample = _hash(b"".join(ends_of(file, status.st_size)))
    return [status.st_size, status.st_mtime_ns, sample]


def _hash(data: bytes | np.ndarray) -> int:
    """Return a hash that fits into an int64."""
    return xxhash.xxh3_64_intdigest(data if isinstance(data, bytes) else data.data) >> 1


def _found(path: str) -> np.ndarray:
    found, position = [np.zeros(1, np.int64)], 0
    with open(path, "rb") as stream:
        while block := stream.read(BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + position + 1
            found.append(ends.astype(np.int64))
            position += len(block)
    starts = np.concatenate(found)
    return starts[starts < position]
