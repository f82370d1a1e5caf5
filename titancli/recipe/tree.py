"""A recipe's data while it is made: plain TOML values, each of which knows where it came from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from titancli.errors import Location
from titancli.recipe.scan import KeyPath, Span

OVERRIDE = "override"
"""The path that a Location has when it lies in an argument of the command line."""


@dataclass(frozen=True)
class Source:
    """A text that keys and values stand in: a file, or one argument of the command line."""

    path: str
    text: str = field(repr=False)
    """With `\\n` line ends."""

    def location(self, span: Span) -> Location:
        """The place of a span; what goes on over the end of its line is left off."""
        start, end = span
        line_start = self.text.rfind("\n", 0, start) + 1
        line_end = self.text.find("\n", start)
        line_end = len(self.text) if line_end < 0 else line_end
        return Location(
            path=self.path,
            line=self.text.count("\n", 0, start) + 1,
            column=start - line_start + 1,
            length=max(1, min(end, line_end) - start),
            source=self.text[line_start:line_end],
        )


@dataclass(frozen=True)
class Origin:
    """Where one value of a recipe came from. `str()` of it is for people: `base.toml:12`, `default`."""

    kind: Literal["file", "override", "flavor", "default"]
    source: Source | None = None
    key: Span | None = None
    value: Span | None = None
    note: str = ""

    def location(self, part: Literal["key", "value"] = "value") -> Location | None:
        """The place of the key or of the value; None for a default."""
        span = (self.key or self.value) if part == "key" else (self.value or self.key)
        return self.source.location(span) if self.source and span else None

    @property
    def text(self) -> str:
        """The value as it was written; empty where it was not (a flavor's place is not its value's)."""
        if self.source is None or self.value is None or self.kind == "flavor":
            return ""
        return self.source.text[self.value[0] : self.value[1]]

    def __str__(self) -> str:
        location = self.location("key")
        if location is None:
            return self.kind
        if location.path == OVERRIDE:
            place = f"override {location.source}"
        else:
            place = f"{location.path}:{location.line}"
        return f"{self.note} ({place})" if self.note else place


DEFAULT = Origin("default")


@dataclass(frozen=True)
class Node:
    """A value and its origin: a dict of nodes, a list of nodes, or a TOML scalar."""

    value: Any
    origin: Origin

    def plain(self, holes: frozenset[KeyPath] | set[KeyPath] = frozenset(), at: KeyPath = ()) -> Any:
        """The value without origins; None where a path is one of `holes`."""
        if at in holes:
            return None
        if isinstance(self.value, dict):
            return {key: node.plain(holes, (*at, key)) for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain(holes, (*at, i)) for i, node in enumerate(self.value)]
        return self.value

    def child(self, key: str | int) -> Node | None:
        """The member of a table or the element of an array; None if there is none."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and str(key).isdecimal():
            index = int(key)
            return self.value[index] if index < len(self.value) else None
        return None

    def follow(self, path: Iterable[str | int]) -> tuple[Node, KeyPath]:
        """Walk along a path as far as it names data; the node reached, and the path to it."""
        node, reached = self, []
        for key in path:
            below = node.child(key)
            if below is None:
                break
            reached.append(int(key) if isinstance(node.value, list) else key)
            node = below
        return node, tuple(reached)


def leaves(node: Node, at: KeyPath = ()) -> Iterable[tuple[KeyPath, Node]]:
    """Every scalar, empty table and empty array below a node, with its path."""
    if isinstance(node.value, dict) and node.value:
        for key, below in node.value.items():
            yield from leaves(below, (*at, key))
    elif isinstance(node.value, list) and node.value:
        for i, below in enumerate(node.value):
            yield from leaves(below, (*at, i))
    else:
        yield at, node


def from_python(value: Any, origin: Origin) -> Node:
    """Nodes of one origin for plain Python data; a None in a table is left out."""
    if isinstance(value, dict):
        return Node({str(k): from_python(v, origin) for k, v in value.items() if v is not None}, origin)
    if isinstance(value, (list, tuple)):
        return Node([from_python(v, origin) for v in value], origin)
    if isinstance(value, (str, bool, int, float)):
        return Node(value, origin)
    return Node(str(value), origin)


def dotted(path: Iterable[str | int]) -> str:
    """A path as it is written in a recipe or an override: `converters.0.recipe`, `"a b".c`."""
    parts = [str(part) for part in path]
    return ".".join(p if re.fullmatch(r"[A-Za-z0-9_-]+", p) else _quoted(p) for p in parts)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m.group()):04x}", escaped) + '"'
