"""The printing functions of all commands: data to stdout, messages to stderr.

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
    """Return whether to use colours: NO_COLOR (https://no-color.org), then FORCE_COLOR, else on a
    terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    styles: Mapping[str, str] | None = None,
    names: Sequence[str] = (),
    explained: bool = False,
) -> None:
    """Print rows in columns.

    Args:
        styles: rich's, by the text of a cell.
        names: titles of columns whose cells may be shortened where a terminal is too narrow; no other cell is
            cut or wrapped then.
        explained: whether the header is printed for programs too, which cannot tell the columns without it.
    """
    header, *rows = [[printable(cell) for cell in row] for row in (header, *rows)]
    if sys.stdout.isatty():
        _draw(header, rows, styles or {}, names)
        return
    shown = [header, *rows] if explained else rows
    widths = [max((len(row[i]) for row in shown), default=0) for i in range(len(header))]
    for row in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _draw(
    header: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str], names: Sequence[str]
) -> None:
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(color_system="auto" if colored(sys.stdout) else None)
    drawing = Table(box=None, pad_edge=False, header_style="bold")
    shown = _fitted(header, rows, names, console.width) if names else rows
    for number, title in enumerate(header):
        style = "cyan" if number == 0 else None
        drawing.add_column(title, no_wrap=bool(names) or number == 0, style=style)
    for row, whole in zip(shown, rows, strict=True):
        drawing.add_row(*(Text(cell, style=styles.get(o, "")) for cell, o in zip(row, whole, strict=True)))
    if names:  # on a terminal that is narrower than the numbers, lines are longer than it
        widths = [max(cell_len(row[number]) for row in (header, *shown)) for number in range(len(header))]
        console.width = max(console.width, sum(widths) + GAP * (len(widths) - 1))
    console.print(drawing)


def _fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], names: Sequence[str], width: int
) -> list[list[str]]:
    """Return the rows with the named columns shortened, the last first, until all fit."""
    from rich.cells import cell_len

    columns = [number for number, title in enumerate(header) if title in names]
    widths = [max(cell_len(row[number]) for row in (header, *rows)) for number in range(len(header))]
    least = [max(cell_len(header[number]), SHORTEST) for number in range(len(header))]
    while sum(widths) + GAP * (len(widths) - 1) > width:
        able = [number for number in columns if widths[number] > least[number]]
        if not able:
            break
        widths[able[-1]] -= 1
    return [
        [shortened(cell, widths[n]) if n in columns else cell for n, cell in enumerate(row)] for row in rows
    ]


GAP, SHORTEST = 2, 8
"""Spaces between columns of a drawn table, and the least width of a shortened column."""


def shortened(text: str, width: int) -> str:
    """Return a text shortened to a maximum number of terminal cells: its beginning and its end."""
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    kept = len(text)
    while kept and cell_len(short := f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}") > width:
        kept -= 1
    return short if kept else "…"


def print_json(schema: str, document: dict[str, Any], *, one_line: bool = False) -> None:
    """Print one JSON document. Its first fields are its schema, `titan.<schema>`, and the schema's
    version."""
    print(json.dumps({"schema": f"titan.{schema}", "version": 1, **document}, indent=None if one_line else 2))


def error_line(message: str, *, hint: str | None = None) -> None:
    """Print an error and its hint to stderr."""
    mark = "\x1b[1;31merror\x1b[0m" if colored(sys.stderr) else "error"
    say(f"{mark}: {clean(message)}")
    if hint:
        say(f" {clean(pasteable(hint))}")


def mark(state: str) -> str:
    """Return `ok`, `warning` or `error` in its colour, padded to a common width."""
    colors = {"ok": 32, "warning": 33, "error": 31}
    word = f"{state:<7}"
    return f"\x1b[{colors[state]}m{word}\x1b[0m" if colored(sys.stdout) else word


def short_path(path: Path) -> str:
    """Return a path as a command accepts it (not an option or override), relative to the working directory if
    below it."""
    short = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
    return f"./{short}" if short.startswith("-") or "=" in short.partition("/")[0] else short


def out(text: str = "") -> None:
    """Print text from foreign files to stdout, without terminal control characters."""
    print(clean(text))


def be_quiet(quiet: bool) -> None:
    """Suppress notes (`-q`), or print them."""
    global _quiet
    _quiet = quiet


def note(message: str) -> None:
    """Print a note to stderr, unless `-q` suppresses notes; commands in it can be pasted."""
    if not _quiet:
        say(clean(pasteable(message)))
