"""How much of remote token shards a machine keeps: what was not used for longest goes, and nothing in use.

A process has a shared lock (flock) on each file of the cache that it has open. It would notice, too, if a
file were removed all the same (see `titancli.data.shards.remote`), and read it again.
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
"""What the names of files end in that say what the others beside them hold."""


def limit() -> int | None:
    """Return how many bytes may be kept; None: all.

    Raises:
        EnvironmentProblem: the environment does not say it with a number.
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
    """Say that a file is in use, for as long as this is open, and when it was."""
    with suppress(OSError):  # a disk without locks: `evict` finds the same
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    with suppress(OSError):  # a cache that is read-only, from which nothing is removed either
        os.utime(path)


def evict(folder: Path, most: int) -> int:
    """Remove files that no process uses, the least recently used first, until no more than `most` bytes are
    left; return how many are. One process does this at a time, and others leave it to that.

    Raises:
        OSError: the disk knows no locks, or the folder cannot be written.
    """
    with open(folder / ".evicting", "a") as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        found = []
        for sums in folder.glob(f"*/*{SUMS}"):
            path = sums.with_suffix("")
            with suppress(FileNotFoundError):  # a user is removing them
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
            sums.unlink(missing_ok=True)  # first: a file without them holds nothing
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass  # another process has removed it
    return True
