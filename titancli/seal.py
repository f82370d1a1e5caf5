"""A checksum within a text, of everything that follows it. Torch-free.

It detects damage and edits by hand; a forger can forge the checksum as well.
"""

from __future__ import annotations

import re

import xxhash

WITHIN = 1 << 10
"""Number of bytes at the beginning that are searched for it."""


class Seal:
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
