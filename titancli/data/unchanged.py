"""A run's data stay what they were when they were identified: files are held against their size and time.

It is asked after bytes were read, so that what was read is what was identified. A file that is rewritten in
the same length within one tick of its disk's clock is not seen here: `titan data verify` reads every byte.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import NamedTuple, NoReturn

from titancli.errors import EnvironmentProblem

SECOND = 10**9
TICKS = (SECOND, 10**6, 10**3, 10**2)
"""What disks keep of a time, in nanoseconds: NFS may keep whole seconds, SMB keeps tenths of microseconds."""
HINT = "do not change data while a run reads them: restore the file and resume, or start a new run"


class Stamp(NamedTuple):
    """What tells that a file was written to."""

    size: int
    modified: int
    """Nanoseconds."""

    @classmethod
    def of(cls, path: str | int) -> Stamp:
        """
        Raises:
            OSError: there is no such file.
        """
        status = os.stat(path)
        return cls(status.st_size, status.st_mtime_ns)

    def same(self, other: Stamp) -> bool:
        """Return whether both may be of the same contents. A disk may keep less of a time than the machine
        that writes, and say more until the file has reached it."""
        one, two = self.modified, other.modified
        if self.size != other.size or one == two:
            return self.size == other.size
        return any(one // tick == two // tick and not (one % tick and two % tick) for tick in TICKS)

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.modified / SECOND, UTC).isoformat(" ", "milliseconds")
        return f"{self.size:,} bytes, written at {when}"


def require_unchanged(path: str, then: Stamp, opened: str | int | None = None) -> None:
    """
    Args:
        opened: a descriptor to ask in place of the path: a file that is open may be replaced or removed.

    Raises:
        EnvironmentProblem: a file is no longer what it was.
        OSError: it is gone, or cannot be asked.
    """
    now = Stamp.of(path if opened is None else opened)
    if not then.same(now):
        _changed(path, then, now)


def _changed(path: str, then: Stamp, now: Stamp) -> NoReturn:
    raise EnvironmentProblem(f"{path} has changed since the run began: it had {then}; now {now}", hint=HINT)
