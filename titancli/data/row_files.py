"""The files of rows that titan reads itself, of datasets of conversations and pairs. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from titancli.data import RowsOfExamples
from titancli.data.compressed import Damaged
from titancli.data.files import TextFile, find_files
from titancli.data.formats import kind_of_rows
from titancli.errors import EnvironmentProblem

SPLIT = re.compile(
    r"(?<![a-z])(train|training|test|testing|valid|validation|val|dev|eval|evaluation)(?![a-z])"
)
BUNDLED = "titan:"
"""Prefix of the names of titan's bundled data."""


def row_files(config: RowsOfExamples, most: int | None = None) -> list[TextFile] | None:
    """Return the files of rows that a config names; None: `datasets` reads what it names.

    Args:
        most: see `find_files`.

    Raises:
        EnvironmentProblem: there is nothing, or it cannot be read.
    """
    path = config.path
    if path.startswith(BUNDLED):
        return find_files(_bundled(path))
    files = find_files(Path(path), most) if os.path.isabs(path) and config.split == "train" else []
    return files if files and (path.endswith(".jsonl") or _of_rows(path, files)) else None


def _of_rows(path: str, files: Iterable[TextFile]) -> bool:
    """Return whether all files hold rows, and none is named after a split."""
    if os.path.isdir(path) and any(SPLIT.search(file.name.lower()) for file in files):
        return False
    for file in files:
        try:
            if kind_of_rows(file.path) == "text":
                return False
        except Damaged:
            pass  # it is reported, or skipped, where rows are read
        except EnvironmentProblem:
            if os.path.isdir(path) or path.endswith(".arrow"):
                return False  # `datasets` knows which files of a folder are its own
            raise
    return True


def _bundled(path: str) -> Path:
    folder = Path(__file__).parent / "bundled"
    found = folder / f"{path.removeprefix(BUNDLED)}.jsonl"
    if not found.is_file():
        names = ", ".join(sorted(BUNDLED + os.path.splitext(name)[0] for name in os.listdir(folder)))
        raise EnvironmentProblem(f"titan has no bundled data {path!r}", hint=f"available: {names}")
    return found
