"""Check that a run's files stay as they were when they were identified, by their sizes and times.

Files are checked after reading, so that the bytes read are the ones identified. A file that is rewritten with
the same length within one tick of its disk's clock is not noticed: `titan data verify` reads every byte.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import NamedTuple, NoReturn

from titancli.errors import EnvironmentProblem

SECOND = 10**9
TICKS = (SECOND, 10**6, 10**3, 10**2)
"""Resolutions of disks' file times in nanoseconds: NFS may keep whole seconds, SMB keeps tenths of
microseconds."""
HINT = "do not change data while a run reads them: restore the file and resume, or start a new run"


class Stamp(NamedTuple):
    """Size and time of a file, by which changes are noticed."""

    size: int
    modified: int
    """Nanoseconds."""

    @classmethod
    def of(cls, path: str | int) -> Stamp:
        """Return the stamp of a file.

        Raises:
            OSError: there is no such file.
        """
        status = os.stat(path)
        return cls(status.st_size, status.st_mtime_ns)

    def same(self, other: Stamp) -> bool:
        """Return whether both may describe the same contents. A disk may store times at a lower resolution
        than the machine that writes, and show the full time until the file has reached the disk."""
        one, two = self.modified, other.modified
        if self.size != other.size or one == two:
            return self.size == other.size
        return any(one // tick == two // tick and not (one % tick and two % tick) for tick in TICKS)

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.modified / SECOND, UTC).isoformat(" ", "milliseconds")
        return f"{self.size:,} bytes, written at {when}"


def require_unchanged(path: str, then: Stamp, opened: str | int | None = None) -> None:
    """Check that a file has not changed.

    Args:
        opened: a descriptor to check in place of the path: an open file may have been replaced or removed.

    Raises:
        EnvironmentProblem: the file has changed.
        OSError: the file is gone, or cannot be checked.
    """
    now = Stamp.of(path if opened is None else opened)
    if not then.same(now):
        _changed(path, then, now)


def _changed(path: str, then: Stamp, now: Stamp) -> NoReturn:
    raise EnvironmentProblem(f"{path} has changed since the run began: it had {then}; now {now}", hint=HINT)
