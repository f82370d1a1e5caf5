"""A checksum within a text, of everything that follows it. Torch-free.

It detects damage and edits by hand; a forger can forge the checksum as well.
"""

from __future__ import annotations

import re
from pathlib import Path

import xxhash

from titancli.errors import EnvironmentProblem

WITHIN = 1 << 10
"""Number of bytes at the beginning that are searched for it."""


class Checksum:
    """Where the checksum stands: between two texts that stand nowhere else before it."""

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, end
        self._pattern = re.compile(re.escape(begin.encode()) + b"([0-9a-f]{16})" + re.escape(end.encode()))

    def put(self, rest: str) -> str:
        """Return a text with its checksum before it."""
        return f"{self._begin}{xxhash.xxh3_64(rest.encode()).hexdigest()}{self._end}{rest}"

    def holds(self, data: bytes) -> bool | None:
        """Return whether the checksum matches the text after it; None if there is none."""
        place = data.find(self._begin.encode(), 0, WITHIN)
        if place < 0:
            return None
        found = self._pattern.match(data, place)
        return found is not None and xxhash.xxh3_64(data[found.end() :]).hexdigest().encode() == found[1]


LOCK_CHECKSUM = Checksum("\n# xxh3_64 of what follows: ", "\n")
RECORD_CHECKSUM = Checksum('{\n  "xxh3_64": "', '",\n')
"""Files without one are taken as they are: of an earlier version of titan, or made by hand."""


def changed_lock(path: Path, data: bytes) -> EnvironmentProblem | None:
    """Return the reason why a resolved recipe is not as titan has written it; None if it is."""
    if LOCK_CHECKSUM.holds(data.replace(b"\r\n", b"\n")) is not False:
        return None
    return EnvironmentProblem(
        f"{path} is damaged, or was edited: its checksum does not match",
        hint="give changes as KEY=VALUE on the command line, and restore the file (each checkpoint of a run "
        "has a copy); to edit it as a recipe, copy it to a file of another name",
    )
