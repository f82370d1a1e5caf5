"""The logs of a run, `logs/*.log`, as lines. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from titancli.files import regular
from titancli.observe.events import BLOCK, LONGEST

RANK_LOG = re.compile(r"rank-(\d{1,9})\Z")


def log_files(logs: Path) -> dict[str, Path]:
    """Return a run's logs by name: `rank-0`, `rank-1`, …, then those of launchers."""
    found = {path.stem: path for path in logs.glob("*.log") if path.is_file()}

    def order(name: str) -> tuple[bool, int, str]:
        rank = RANK_LOG.match(name)
        return rank is None, int(rank[1]) if rank else 0, name

    return {name: found[name] for name in sorted(found, key=order)}


class Lines:
    """Reads a file's lines, and those that are appended: the last `count` of those that are there, or all."""

    def __init__(self, path: Path, count: int | None = None) -> None:
        self._path = path
        self._offset = 0 if count is None else _last(path, count)
        self._partial = b""

    def poll(self) -> Iterator[str]:
        """Yield the lines written since the last call; one that is not whole yet is left for the next."""
        try:
            with open(self._path, "rb", opener=regular) as file:
                if file.seek(0, 2) < self._offset:  # somebody has made it shorter: it begins anew
                    self._offset, self._partial = 0, b""
                file.seek(self._offset)
                while data := file.read(BLOCK):
                    self._offset += len(data)
                    *whole, self._partial = (self._partial + data).split(b"\n")
                    if len(self._partial) > LONGEST:  # no line: memory is not to grow with it
                        whole, self._partial = [*whole, self._partial], b""
                    for line in whole:
                        yield line.decode("utf-8", "replace")
        except OSError:  # its rank has not been started yet, or a network disk fails for a moment
            return

    def rest(self) -> Iterator[str]:
        """Yield what has no end of line, once nothing more will come."""
        if self._partial:
            yield self._partial.decode("utf-8", "replace")
            self._partial = b""


def _last(path: Path, count: int) -> int:
    """Return the offset of the last `count` lines; read only as much of the file as these take."""
    try:
        with open(path, "rb", opener=regular) as file:
            position = end = file.seek(0, 2)
            if count == 0:
                return end
            wanted = count + 1  # the end of the line before them
            while position > 0:
                size = min(BLOCK, position)
                position -= size
                file.seek(position)
                data = file.read(size)
                if position + size == end and not data.endswith(b"\n"):
                    wanted -= 1  # the last line has no end yet
                while (found := data.rfind(b"\n")) >= 0:
                    wanted -= 1
                    if wanted == 0:
                        return position + found + 1
                    data = data[:found]
    except OSError:  # as in `poll`, which then reads it from its beginning
        return 0
    return 0
