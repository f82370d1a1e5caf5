"""Lengths of a dataset's rows: measured once, by all ranks and workers of a machine together, and cached."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titancli.fingerprint import cache_folder

logger = logging.getLogger(__name__)

BAD = -1
"""Length recorded for a bad row."""
CHUNK = 256
"""Rows that a process measures at a time."""
_STORED = 2
"""Offset of lengths in the file, where zeros mark rows that have not been measured yet."""
_SUM_BYTES = 8
"""Size of the checksum after the lengths; zeros until all are measured."""


def row_lengths(
    identity: Mapping[str, Any], count: int, measure: Callable[[range], Sequence[int]]
) -> np.ndarray:
    """Return the length of each of `count` rows, int32, as measured by `measure`; BAD for bad rows.

    Processes that call this at the same time divide the rows among them and wait for each other.

    Args:
        identity: plain JSON; equal only if all lengths are equal.

    Raises:
        TitanError: raised by `measure`.
    """
    name = xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())
    path = cache_folder() / "lengths" / f"{name}.i32"
    try:
        if path.is_file() and (known := _known(path, count)) is not None:
            return known
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.ftruncate(descriptor, 4 * count + _SUM_BYTES)
            logger.info("measuring %d rows, once; their lengths are kept in %s", count, path)
            chunks = -(-count // CHUNK)
            order = [(chunk + os.getpid()) % chunks for chunk in range(chunks)]  # each process at another
            for wait in (False, True):
                for chunk in order:
                    _measure(descriptor, range(chunk * CHUNK, min(count, (chunk + 1) * CHUNK)), measure, wait)
            found = np.frombuffer(os.pread(descriptor, 4 * count, 0), "<i4")
            if len(found) != count or not found.all():
                raise OSError(errno.ENOSPC, "not all of them were written")
            os.pwrite(descriptor, xxhash.xxh3_64_digest(found.tobytes()), 4 * count)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return found - _STORED
    except OSError as error:
        logger.warning("lengths cannot be kept in %s (%s): each rank measures all rows", path, error)
        return np.array(measure(range(count)), np.int32)


def _known(path: Path, count: int) -> np.ndarray | None:
    """Return the lengths in a file, and None if some are missing; empty the file if it is damaged."""
    data = path.read_bytes()
    lengths, checksum = data[: 4 * count], data[4 * count :]
    if len(data) == 4 * count + _SUM_BYTES and not any(checksum):
        return None  # some process is still measuring, or was stopped
    if checksum != xxhash.xxh3_64_digest(lengths):
        logger.warning("%s is damaged, and its rows are measured again", path)
        os.truncate(path, 0)
        return None
    return np.frombuffer(lengths, "<i4") - _STORED


def _measure(descriptor: int, rows: range, measure: Callable[[range], Sequence[int]], wait: bool) -> None:
    """Measure some rows unless another process has, or is doing so; with `wait`, wait for that process
    first."""
    place = (4 * len(rows), 4 * rows.start)
    if np.frombuffer(os.pread(descriptor, *place), "<i4").all():
        return
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), *place)
    except (BlockingIOError, PermissionError):
        return
    except OSError as error:
        logger.debug("no locks on this disk, so several processes may measure the same rows: %s", error)
    try:
        if not np.frombuffer(os.pread(descriptor, *place), "<i4").all():
            found = np.array(measure(rows), "<i4") + _STORED
            os.pwrite(descriptor, found.tobytes(), place[1])
    finally:
        with suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_UN, *place)
