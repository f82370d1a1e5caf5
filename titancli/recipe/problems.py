"""The mistakes in a recipe: collected while it is read, then shown together."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal

from titancli.errors import Location, Problem, RecipeError, nearest_name
from titancli.recipe.toml import OVERRIDE

WIDTH = 160
"""Maximum width of a source line; longer ones are cut."""
SWITCHES = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
"""Common spellings of booleans."""


class Problems:
    """Collects problems; files are sorted in the order in which they were first named."""

    def __init__(self) -> None:
        self._found: list[Problem] = []
        self._files: dict[str, int] = {}

    def file(self, path: str) -> None:
        """Register a file, which fixes its place in the order."""
        self._files.setdefault(path, len(self._files))

    def add(self, code: str, message: str, location: Location | None = None, hint: str | None = None) -> None:
        problem = Problem(code, message, location, hint)
        if problem not in self._found:
            self._found.append(problem)

    def drop(self, code: str) -> None:
        """Remove the problems with one code."""
        self._found = [problem for problem in self._found if problem.code != code]

    def __bool__(self) -> bool:
        return bool(self._found)

    def sorted(self) -> list[Problem]:
        """Return the problems sorted by place: files, then overrides, then those without a place."""
        return sorted(self._found, key=self._place)

    def _place(self, problem: Problem) -> tuple[int, int, int, int]:
        at = problem.location
        if at is None:
            return (2, 0, 0, 0)
        if at.path == OVERRIDE:
            return (1, 0, 0, 0)
        return (0, self._files.get(at.path, len(self._files)), at.line, at.column)

    def raise_any(self) -> None:
        """Raise an error if there are problems.

        Raises:
            RecipeError: there are problems; it holds them all.
        """
        if self._found:
            raise RecipeError(self.sorted())


def did_you_mean(name: str | None) -> str | None:
    """Return the hint that suggests a name."""
    return name and f"did you mean {name!r}?"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return a hint with the most similar name; None if none is similar."""
    return did_you_mean(nearest_name(name, names))


def render_problems(
    problems: Sequence[Problem], format: Literal["text", "json", "github"] = "text", color: bool = False
) -> str:
    """Render problems as text, as one JSON document, or as GitHub annotations; without a final newline."""
    if format == "json":
        return json.dumps({"version": 1, "problems": problems_data(problems)}, indent=2)
    if format == "github":
        return "\n".join(_as_github(p) for p in problems)
    return "\n\n".join(_as_text(p, color) for p in problems)


def problems_data(problems: Sequence[Problem]) -> list[dict[str, str | int | None]]:
    """Return problems in the form of the JSON document."""
    return [_as_json(problem) for problem in problems]


def _as_json(problem: Problem) -> dict[str, str | int | None]:
    place = ("path", "line", "column", "length", "source")
    return {
        "code": problem.code,
        "message": problem.message,
        "hint": problem.hint,
        **{name: getattr(problem.location, name, None) for name in place},
    }


def _as_github(problem: Problem) -> str:
    properties = {"title": problem.code}
    at = problem.location
    if at is not None and at.path != OVERRIDE:
        place = {"file": at.path, "line": at.line, "col": at.column, "endColumn": at.column + at.length}
        properties = {**{k: str(v) for k, v in place.items()}, **properties}
    text = problem.message if problem.hint is None else f"{problem.message}: {problem.hint}"
    if at is not None and at.path == OVERRIDE:
        text = f"{text} (in override {at.source})"
    written = ",".join(f"{name}={_escape(value, ':,')}" for name, value in properties.items())
    return f"::error {written}::{_escape(text)}"


def _escape(text: str, also: str = "") -> str:
    return re.sub(rf"[%\r\n{also}]", lambda m: f"%{ord(m.group()):02X}", text)


def _as_text(problem: Problem, color: bool) -> str:
    def paint(code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if color else text

    lines = [f"{paint('1;31', f'error[{problem.code}]')}: {paint('1', _printable(problem.message))}"]
    at = problem.location
    if at is None:
        return "\n".join([*lines, f" {_printable(problem.hint)}"] if problem.hint else lines)
    source, column, length = _clip(at)
    gutter = " " * len(str(at.line))
    underlined = source[column - 1 : column - 1 + length]
    before = "".join(c if c == "\t" else " " * _cells(c) for c in source[: column - 1])
    carets = "^" * max(1, sum(_cells(c) for c in underlined))
    note = f" {_printable(problem.hint)}" if problem.hint else ""
    lines += [
        f" {paint('34', '-->')} {_printable(at.path)}:{at.line}:{at.column}",
        f" {paint('34', f'{at.line} |')} {source}",
        f" {paint('34', f'{gutter} |')} {before}{paint('1;31', carets + note)}",
    ]
    return "\n".join(lines)


def _clip(at: Location) -> tuple[str, int, int]:
    """Return the line to show, the column in it, and the length to underline."""
    source, column, length = _printable(at.source), at.column, at.length
    if len(source) > WIDTH:
        start = max(0, min(column - 1 - WIDTH // 4, len(source) - WIDTH))
        source, column = source[start : start + WIDTH], column - start
    return source, column, max(1, min(length, len(source) - column + 1))


def _printable(text: str) -> str:
    """Return a text with terminal control characters replaced; its length stays the same."""
    return "".join(
        c if c in "\t\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else "�" for c in text
    )


def _cells(char: str) -> int:
    """Return the number of terminal columns of a character."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
