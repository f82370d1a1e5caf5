"""A recipe file that a command writes: its path, its name, and the command to run next."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from titancli.errors import EnvironmentProblem, UsageError
from titancli.files import encoded


def refuse_file(file: Path) -> None:
    """Refuse a path at which no new recipe can be written.

    Raises:
        UsageError: its name does not end in .toml, or it exists.
        EnvironmentProblem: its folder does not exist.
    """
    if file.suffix != ".toml":
        raise UsageError(f"{file}: the file name of a recipe must end in .toml")
    if file.exists():
        raise UsageError(f"{file} exists", hint="give another name, or remove it")
    if not file.absolute().parent.is_dir():
        raise EnvironmentProblem(
            f"folder {file.parent} does not exist", hint=f"mkdir -p {shlex.quote(str(file.parent))}"
        )


def recipe_name(file: Path) -> str:
    """Return the `name` of a recipe in this file."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", file.stem).strip("-._") or "run"


def write_new(file: Path, text: str) -> None:
    """Write a file that does not exist yet.

    Raises:
        FileExistsError: something else has just written it.
        EnvironmentProblem: the text names a path that is not UTF-8.
    """
    data = encoded(file, text)
    with file.open("xb") as opened:
        opened.write(data)


def next_step(file: Path) -> str:
    """Return the line that says how to see what the recipe would run."""
    return f"next:  titan train {shlex.quote(str(file))} --dry-run"
