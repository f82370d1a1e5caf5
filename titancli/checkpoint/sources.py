"""Checkpoints whose files are not all in their folder: who brings those that a load is about to read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

Range = tuple[str, int, int]
"""A file, and the first and the end of the bytes that are needed."""


class Sources(Protocol):
    """The files of one checkpoint, which other nodes may have. All methods are collective.

    Until it was taken, a range reads as zeros, whose checksums are wrong.
    """

    def take(self, wanted: Iterable[Range]) -> None:
        """Bring what this rank is about to read into the folder.

        Raises:
            DamagedCheckpoint: nobody has a file; raised on all ranks.
        """

    def refuse(self, file: str | None) -> bool:
        """Give up a file that this rank found damaged, and return whether each file that any rank found
        damaged has another copy."""
        ...

    def whole(self, names: Iterable[str]) -> list[Range]:
        """Return the ranges of whole files."""
        ...


_of: dict[Path, Sources] = {}


def lend(folder: Path, sources: Sources) -> None:
    """Let loads from a folder in this process take its files from these sources, until `end`."""
    _of[folder] = sources


def end(folder: Path) -> None:
    """Forget the sources of a folder."""
    _of.pop(folder, None)


def sources_of(folder: Path) -> Sources | None:
    """Return the sources of a checkpoint's files; None: all are in the folder itself."""
    return _of.get(folder)
