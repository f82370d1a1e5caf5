"""What every command prints with: data to stdout, words to stderr.

A table is drawn with rich for a person at a terminal, and is plain columns for everyone else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from titancli.signals import say
from titancli.terminal import clean, pasteable, printable

_quiet = False


def prepare_streams() -> None:
    """Make the standard streams take whatever is printed, even if they are closed (`2>&-`) or cannot encode a
    character."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    number = 0
    while closed and number <= 2:  # else the next file gets the number, and what libraries print with it
        number = os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(number, number <= 2)
    for name in closed:
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - for good
    if hasattr(sys.stdout, "reconfigure"):  # a terminal of another encoding gets \\u escapes, not an error
        sys.stdout.reconfigure(errors="backslashreplace")


def colored(stream: TextIO) -> bool:
    """Whether to colour: as NO_COLOR (https://no-color.org) or FORCE_COLOR says, else on a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, styles: Mapping[str, str] | None = None
) -> None:
    """Print rows in columns; the header only for people. `styles`: rich's, by the text of a cell."""
    header, *rows = [[printable(cell) for cell in row] for row in (header, *rows)]
    if sys.stdout.isatty():
        _draw(header, rows, styles or {})
        return
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(header))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _draw(header: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawing = Table(box=None, pad_edge=False, header_style="bold")
    for number, title in enumerate(header):
        drawing.add_column(title, no_wrap=number == 0, style="cyan" if number == 0 else None)
    for row in rows:
        drawing.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    Console(color_system="auto" if colored(sys.stdout) else None).print(drawing)


def print_json(schema: str, document: dict[str, Any], *, one_line: bool = False) -> None:
    """Print one document. It begins with its schema, `titan.<schema>`, and the version of that."""
    print(json.dumps({"schema": f"titan.{schema}", "version": 1, **document}, indent=None if one_line else 2))


def error_line(message: str, *, hint: str | None = None) -> None:
    """Say on stderr what went wrong, and what to do."""
    mark = "\x1b[1;31merror\x1b[0m" if colored(sys.stderr) else "error"
    say(f"{mark}: {clean(message)}")
    if hint:
        say(f" {clean(pasteable(hint))}")


def mark(state: str) -> str:
    """`ok`, `warning` or `error` in its colour, padded to one width."""
    colors = {"ok": 32, "warning": 33, "error": 31}
    word = f"{state:<7}"
    return f"\x1b[{colors[state]}m{word}\x1b[0m" if colored(sys.stdout) else word


def short_path(path: Path) -> str:
    """Return a path relative to where the command runs, if it lies below; as a command takes it, that is
    neither an option nor an override."""
    short = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
    return f"./{short}" if short.startswith("-") or "=" in short.partition("/")[0] else short


def out(text: str = "") -> None:
    """Print to stdout what comes from files of others: without what a terminal would obey."""
    print(clean(text))


def be_quiet(quiet: bool) -> None:
    """Whether notes are left out (`-q`)."""
    global _quiet
    _quiet = quiet


def note(message: str) -> None:
    """Say something on stderr that `-q` leaves out; commands in it can be pasted."""
    if not _quiet:
        say(clean(pasteable(message)))
