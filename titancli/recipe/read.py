"""From a file to a Node: decode, parse, find positions, reject values that a recipe cannot hold."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal

import tomli

from titancli.checksum import changed_lock
from titancli.errors import Location, Problem, RecipeError
from titancli.files import NotRegular, denied, regular
from titancli.recipe.problems import Problems
from titancli.recipe.toml import KeyPath, Node, Origin, Positions, Source, scan
from titancli.runs import LOCK_NAME, NEXT_NAME

FORMAT = 1
"""The recipe format that this titan reads."""
LARGEST = 1 << 24
"""Maximum size of a recipe in bytes."""
DEEPEST = 64
"""Maximum nesting of tables and arrays."""


def read_file(path: Path, problems: Problems, named_at: Location | None = None) -> Node | None:
    """Read a TOML file; return None after reporting to `problems` if that fails.

    `named_at`: where the file is named, for a file that cannot be read.
    """
    shown = str(path)
    problems.file(shown)
    try:
        named = path.is_relative_to("/dev")  # `titan validate /dev/stdin`, which only a user can write
        with open(path, "rb", opener=None if named else regular) as file:
            raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = str(error)
        if isinstance(error, OSError):
            reason = str(error.strerror if isinstance(error, NotRegular) else os.strerror(error.errno or 0))
        problems.add("unreadable", f"cannot read {shown}: {reason}", named_at, denied(error))
        return None
    if path.name in (LOCK_NAME, NEXT_NAME) and (changed := changed_lock(path, raw)) is not None:
        problems.add("changed-lock", changed.message, named_at, changed.hint)
        return None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        good = raw[: error.start].decode("utf-8-sig", "replace").replace("\r\n", "\n")
        location = Source(shown, good).location((len(good), len(good)))
        message = f"{shown} is not UTF-8: {error.reason} at byte {error.start}"
        problems.add("not-utf8", message, location, "save it as UTF-8")
        return None
    try:
        return parse(Source(shown, text.replace("\r\n", "\n")), "file")
    except RecipeError as error:
        for problem in error.problems:
            problems.add(problem.code, problem.message, problem.location or named_at, problem.hint)
        return None


def parse(source: Source, kind: Literal["file", "override"]) -> Node:
    """Return the data of a TOML text, every value with its place.

    Raises:
        RecipeError: the text is not TOML, or is nested deeper than a recipe can be.
        TOMLDecodeError: an override is not TOML.
    """
    try:
        data = tomli.loads(source.text)
        return _node(data, (), scan(source.text), Origin(kind, source, (0, 0)))
    except tomli.TOMLDecodeError as error:
        if kind == "override":  # it is text then, which is no mistake
            raise
        from titancli.recipe.syntax import explain

        raise RecipeError([explain(source, error)]) from error
    except RecursionError as error:
        message = f"{source.path}: tables and arrays are nested more than {DEEPEST} deep"
        raise RecipeError([Problem("syntax", message)]) from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise RecipeError([Problem("syntax", f"{source.path}: {error}")]) from error


def _node(value: Any, path: KeyPath, places: Positions, outer: Origin) -> Node:
    if len(path) > DEEPEST:
        raise RecursionError
    key, span = places.keys.get(path), places.values.get(path)
    origin = Origin(outer.kind, outer.source, key, span) if key or span else outer
    if isinstance(value, dict):
        return Node({k: _node(v, (*path, k), places, origin) for k, v in value.items()}, origin)
    if isinstance(value, list):
        return Node([_node(v, (*path, i), places, origin) for i, v in enumerate(value)], origin)
    return Node(value, origin)


def refuse_values(root: Node, problems: Problems) -> set[KeyPath]:
    """Report dates, nan, inf and integers beyond 64 bits; return their paths."""
    refused: set[KeyPath] = set()
    pending: list[tuple[KeyPath, Node]] = [((), root)]
    while pending:
        path, node = pending.pop()
        value = node.value
        if isinstance(value, dict):
            pending += [((*path, k), below) for k, below in value.items()]
        elif isinstance(value, list):
            pending += [((*path, i), below) for i, below in enumerate(value)]
        elif (wrong := _wrong_value(value)) is not None:
            code, message = wrong
            quotable = code == "wrong-type" or node.origin.kind == "override"
            hint = f"for a string, put quotes around it: {quoting(node)}" if quotable else None
            problems.add(code, message, node.origin.location(), hint)
            refused.add(path)
    return refused


def _wrong_value(value: Any) -> tuple[str, str] | None:
    if isinstance(value, float) and not math.isfinite(value):
        return "not-finite", "nan and inf are not allowed in a recipe"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "out-of-range", "an integer must fit in 64 bits"
    if not isinstance(value, (str, bool, int, float)):
        return "wrong-type", "dates and times are not allowed in a recipe"
    return None


def taken_as_text(node: Node) -> str | None:
    """Return the hint for an override that resembles a TOML value and was read as text."""
    if node.origin.kind != "override" or not isinstance(node.value, str) or node.origin.text != node.value:
        return None
    if not node.value.startswith(("[", "{", '"', "'")):
        return None
    return "this is not a TOML value, so it was read as a string; inside [] and {} strings need quotes"


def quoting(node: Node) -> str:
    """Return how to quote a value that TOML read as another type, to make it a string."""
    origin = node.origin
    written = origin.text or str(node.value)
    if origin.kind == "override" and origin.source and origin.value:
        whole = origin.source.text.rstrip()
        if origin.value[1] == len(whole):  # not an element of an array
            return f"""'{whole[: origin.value[0]]}"{written}"'"""
    return f'"{written}"'
