"""How long each row of a dataset is: found once, by all ranks and workers of a machine together, and kept."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import xxhash

from titancli.fingerprint import cache_folder

logger = logging.getLogger(__name__)

BAD = -1
"""The length of a row that is no example."""
CHUNK = 256
"""Rows that a process takes at once."""
_STORED = 2
"""Added to each length in the file, whose zeros are rows that nobody has measured yet."""


def row_lengths(
    identity: Mapping[str, Any], count: int, measure: Callable[[range], Sequence[int]]
) -> np.ndarray:
    """Return the length of each of `count` rows, int32, as `measure` says them; BAD for one that is none.

    Every process that asks at the same time measures other rows than the rest, and waits for them.

    Args:
        identity: plain JSON; equal only where all lengths are.

    Raises:
        TitanError: what `measure` raises.
    """
    name = xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())
    path = cache_folder() / "lengths" / f"{name}.i32"
    try:
        if path.is_file() and len(found := np.fromfile(path, "<i4")) == count and found.all():
            return found - _STORED
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.ftruncate(descriptor, 4 * count)
            logger.info("measuring %d rows, once; their lengths are kept in %s", count, path)
            chunks = -(-count // CHUNK)
            order = [(chunk + os.getpid()) % chunks for chunk in range(chunks)]  # each begins elsewhere
            for wait in (False, True):
                for chunk in order:
                    _measure(descriptor, range(chunk * CHUNK, min(count, (chunk + 1) * CHUNK)), measure, wait)
        finally:
            os.close(descriptor)
        if not (found := np.fromfile(path, "<i4")).all():
            raise OSError(errno.ENOSPC, "not all of them were written")
        return found - _STORED
    except OSError as error:
        logger.warning("lengths cannot be kept in %s (%s): each rank measures all rows", path, error)
        return np.array(measure(range(count)), np.int32)


def _measure(descriptor: int, rows: range, measure: Callable[[range], Sequence[int]], wait: bool) -> None:
    """Measure some rows if nobody has, or does at the moment; with `wait`, ensure that they are."""
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
