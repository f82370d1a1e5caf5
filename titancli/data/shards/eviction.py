"""The limit on cached remote token shards: the least recently used are evicted first, and none in use.

A process holds a shared lock (flock) on each cached file that it has open. It would also notice if a file
were removed regardless (see `titancli.data.shards.remote`), and read it again.
"""

from __future__ import annotations

import fcntl
import math
import os
from contextlib import suppress
from pathlib import Path

from titancli.errors import EnvironmentProblem

LIMIT = "TITAN_SHARDS_GB"
SUMS = ".sums"
"""Suffix of the files with the checksums of the files beside them."""


def limit() -> int | None:
    """Return how many bytes may be kept; None: no limit.

    Raises:
        EnvironmentProblem: the environment variable is not a positive number.
    """
    said = os.environ.get(LIMIT)
    if not said:
        return None
    with suppress(ValueError):
        if 0 < (size := float(said)) < math.inf:
            return int(size * 1e9)
    raise EnvironmentProblem(
        f"{LIMIT}={said!r} is not a number of GB above 0", hint=f"such as {LIMIT}=500, or unset it"
    )


def use(descriptor: int, path: str) -> None:
    """Mark a file as in use while the descriptor is open, and update its time of use."""
    with suppress(OSError):  # a disk without locks: `evict` will fail too
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    with suppress(OSError):  # a read-only cache, from which nothing is removed either
        os.utime(path)


def evict(folder: Path, most: int) -> int:
    """Remove unused files, the least recently used first, until at most `most` bytes are left; return how
    many are.

    Only one process does this at a time; the others skip it.

    Raises:
        OSError: the disk does not support locks, or the folder cannot be written.
    """
    with open(folder / ".evicting", "a") as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        found = []
        for sums in folder.glob(f"*/*{SUMS}"):
            path = sums.with_suffix("")
            with suppress(FileNotFoundError):  # another process is removing them
                status = path.stat()
                size = 512 * (status.st_blocks + sums.stat().st_blocks)
                found.append((max(status.st_atime, status.st_mtime), size, path, sums))
        kept = sum(size for _, size, _, _ in found)
        for _, size, path, sums in sorted(found):
            if kept > most and _removed(path, sums):
                kept -= size
    return kept


def _removed(path: Path, sums: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sums.unlink(missing_ok=True)  # first: a file without checksums counts as empty
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass  # already removed by another process
    return True
