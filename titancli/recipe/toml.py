"""A TOML text as a tree: every value with its place in the text.

TOML libraries do not report places, and an error message needs them. The scanner relies on tomli having
accepted the text already, so it only has to find where items begin and end. It reads TOML 1.1 (inline tables
over several lines, trailing commas).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import tomli

from titancli.errors import Location
from titancli.terminal import printable

# ----------------------------------------------------------------------------------------------------- places


KeyPath = tuple[str | int, ...]
"""Keys, and numbers for array elements: `("converters", 0, "recipe")`."""
Span = tuple[int, int]
"""Start and end, in characters of the text."""

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_SCALAR = r'''(?:
    """(?:[^"\\]+|\\.|""?(?!"))*"{3,5}
  | \'\'\'(?:[^']+|''?(?!'))*'{3,5}
  | "(?:[^"\\\n]+|\\.)*"
  | '[^'\n]*'
  | \d{4}-\d\d-\d\d[ ]\d\d:[^\s,\]}#]*
  | [^\s,\[\]{}#"'][^\s,\]}#]*
)'''
_PAIR = re.compile(rf"({_PART})[ \t]*=[ \t]*({_SCALAR})", re.VERBOSE | re.DOTALL)
_KEY = re.compile(rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*")
_KEY_PART = re.compile(_PART)
_VALUE = re.compile(_SCALAR, re.VERBOSE | re.DOTALL)
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_SKIP = re.compile(r"(?:[ \t\n]+|#[^\n]*)*")
_SEPARATOR = re.compile(r"(?:[ \t\n,]+|#[^\n]*)*")
_HEADER_END = re.compile(r"[ \t]*\]\]?")


@dataclass
class Positions:
    """Spans by path. A table's value is its header or its braces; an implicit table has only a key."""

    keys: dict[KeyPath, Span] = field(default_factory=dict)
    values: dict[KeyPath, Span] = field(default_factory=dict)


def scan(text: str, found: Positions | None = None) -> Positions:
    """Find every key and value of a valid TOML text whose line ends are all `\\n`.

    Args:
        found: receives them.
    """
    return _Scanner(text, found or Positions()).run()


def match_key(text: str) -> tuple[list[str], int] | None:
    """Return the parts of the dotted key at the start of a text, and its end; None if there is none."""
    found = _KEY.match(text)
    if found is None:
        return None
    try:
        return [_decode(part) for part in _KEY_PART.findall(found.group())], found.end()
    except tomli.TOMLDecodeError:  # a bad escape in a quoted part
        return None


def _decode(part: str) -> str:
    if part[0] == "'":
        return part[1:-1]
    return next(iter(tomli.loads(f"{part} = 0"))) if part[0] == '"' else part


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(f"invalid TOML at character {at}: {text[at : at + 20]!r}")
    return found.end()


class _Scanner:
    def __init__(self, text: str, found: Positions) -> None:
        self.text = text
        self.found = found
        self.tables: dict[KeyPath, int] = {}
        """Arrays of tables, and how many tables each has so far."""

    def run(self) -> Positions:
        text, end = self.text, len(self.text)
        table: KeyPath = ()
        at = _end(_SKIP, text, 0)
        while at < end:
            if text[at] == "[":
                table, at = self._header(at)
            else:
                at = self._pair(at, table)
            at = _end(_SKIP, text, at)
        return self.found

    def _header(self, start: int) -> tuple[KeyPath, int]:
        array = self.text.startswith("[[", start)
        at = _end(_SKIP, self.text, start + 1 + array)
        parts, at = self._key(at)
        end = _end(_HEADER_END, self.text, at)
        path: KeyPath = ()
        for name, span in parts[:-1]:
            path = (*path, name)
            self.found.keys.setdefault(path, span)
            if path in self.tables:
                path = (*path, self.tables[path] - 1)
        name, span = parts[-1]
        path = (*path, name)
        if array:
            self.found.keys.setdefault(path, span)
            index = self.tables.get(path, 0)
            self.tables[path] = index + 1
            path = (*path, index)
        self.found.keys[path] = span
        self.found.values[path] = (start, end)
        return path, end

    def _key(self, at: int) -> tuple[list[tuple[str, Span]], int]:
        end = _end(_KEY, self.text, at)
        return [(_decode(m.group()), m.span()) for m in _KEY_PART.finditer(self.text, at, end)], end

    def _pair(self, at: int, table: KeyPath) -> int:
        plain = _PAIR.match(self.text, at)
        if plain is not None:  # nine pairs of ten: one key, one scalar
            path = (*table, _decode(plain.group(1)))
            self.found.keys[path] = plain.span(1)
            self.found.values[path] = plain.span(2)
            return plain.end()
        parts, at = self._key(at)
        path = table
        for name, span in parts:
            path = (*path, name)
            self.found.keys.setdefault(path, span)
        return self._value(_end(_EQUALS, self.text, at), path)

    def _value(self, at: int, path: KeyPath) -> int:
        opening = self.text[at]
        if opening == "[":
            end = self._array(at + 1, path)
        elif opening == "{":
            end = self._inline_table(at + 1, path)
        else:
            end = _end(_VALUE, self.text, at)
        self.found.values[path] = (at, end)
        return end

    def _array(self, at: int, path: KeyPath) -> int:
        index = 0
        while self.text[at := _end(_SEPARATOR, self.text, at)] != "]":
            at = self._value(at, (*path, index))
            index += 1
        return at + 1

    def _inline_table(self, at: int, path: KeyPath) -> int:
        while self.text[at := _end(_SEPARATOR, self.text, at)] != "}":
            at = self._pair(at, path)
        return at + 1


# ----------------------------------------------------------------------------------------------------- values


OVERRIDE = "override"
"""Path of a Location in an argument of the command line."""


@dataclass(frozen=True)
class Source:
    """The text that contains keys and values: a file, or one argument of the command line."""

    path: str
    text: str = field(repr=False)
    """With `\\n` line ends."""

    def location(self, span: Span) -> Location:
        """Return the place of a span, cut at the end of its first line."""
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
    """The origin of a recipe's value. `str()` of it is for people: `base.toml:12`, `default`."""

    kind: Literal["file", "override", "flavor", "default"]
    source: Source | None = None
    key: Span | None = None
    value: Span | None = None
    note: str = ""

    def location(self, part: Literal["key", "value"] = "value") -> Location | None:
        """Return the place of the key or of the value; None for a default."""
        span = (self.key or self.value) if part == "key" else (self.value or self.key)
        return self.source.location(span) if self.source and span else None

    @property
    def text(self) -> str:
        """Return the value as written; empty if it was not (a flavor's place is not its value's)."""
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
        """Return the value without origins, with None at paths in `holes`."""
        if at in holes:
            return None
        if isinstance(self.value, dict):
            return {key: node.plain(holes, (*at, key)) for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain(holes, (*at, i)) for i, node in enumerate(self.value)]
        return self.value

    def child(self, key: str | int) -> Node | None:
        """Return the member of a table or the element of an array; None if there is none."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and str(key).isdecimal():
            index = int(key)
            return self.value[index] if index < len(self.value) else None
        return None

    def follow(self, path: Iterable[str | int]) -> tuple[Node, KeyPath]:
        """Walk along a path as far as there is data; return the node reached, and the path to it."""
        node, reached = self, []
        for key in path:
            below = node.child(key)
            if below is None:
                break
            reached.append(int(key) if isinstance(node.value, list) else key)
            node = below
        return node, tuple(reached)


def leaves(node: Node, at: KeyPath = ()) -> Iterable[tuple[KeyPath, Node]]:
    """Yield every scalar, empty table and empty array below a node, with its path."""
    if isinstance(node.value, dict) and node.value:
        for key, below in node.value.items():
            yield from leaves(below, (*at, key))
    elif isinstance(node.value, list) and node.value:
        for i, below in enumerate(node.value):
            yield from leaves(below, (*at, i))
    else:
        yield at, node


def from_python(value: Any, origin: Origin) -> Node:
    """Return nodes of one origin for plain Python data; a None in a table is left out."""
    if isinstance(value, dict):
        return Node({str(k): from_python(v, origin) for k, v in value.items() if v is not None}, origin)
    if isinstance(value, (list, tuple)):
        return Node([from_python(v, origin) for v in value], origin)
    if isinstance(value, (str, bool, int, float)):
        return Node(value, origin)
    return Node(str(value), origin)


def dotted(path: Iterable[str | int]) -> str:
    """Return a path as written in a recipe or an override: `converters.0.recipe`, `"a b".c`."""
    parts = [str(part) for part in path]
    return ".".join(p if re.fullmatch(r"[A-Za-z0-9_-]+", p) else _quoted(p) for p in parts)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _visible(escaped, "") + '"'


def _visible(text: str, keep: str) -> str:
    """Return a TOML text with escapes for what a terminal obeys or an editor hides, except the characters in
    `keep`. A surrogate stays: TOML has no escape for it."""
    if all(map(str.isprintable, text.split("\n") if keep else [text])):
        return text
    return "".join(
        char if char in keep or unicodedata.category(char) not in _HIDDEN else _escape(ord(char))
        for char in text
    )


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


_HIDDEN = {"Cc", "Cf", "Cn", "Co", "Zl", "Zp"}
"""Unicode's categories of controls, marks of direction, line separators and characters without a picture."""


def toml_text(data: dict[str, Any]) -> str:
    """Return a table as TOML: all its strings are on one line, and what cannot be seen is escaped."""
    import tomli_w

    return _visible(tomli_w.dumps(data), "\n")


def toml_blocks(data: dict[str, Any]) -> str:
    """Return a table as TOML that people edit: each table of its arrays has a header `[[key]]`, in a block of
    its own after the other keys."""
    arrays = {
        key: value
        for key, value in data.items()
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    }
    blocks = [toml_text({key: value for key, value in data.items() if key not in arrays})]
    for key, tables in arrays.items():
        header = toml_text({key: {}})
        # Written below its key, a table inside it is [key.table], which TOML reads as the last element's.
        below = (toml_text({key: table}).removeprefix(header) for table in tables)
        blocks += [f"[{header.rstrip()}]\n{text}" for text in below]
    return "\n".join(filter(None, blocks))


def comment(text: str, mark: str = "# ") -> str:
    """Return a text, whatever it holds, as one comment of a TOML file, without a line break at its end."""
    return mark + printable(" ".join(text.split()))


def inline(value: Any) -> str:
    """Return a value on one line, as written in a recipe; a None in a table is left out."""
    if isinstance(value, dict):
        known = {key: below for key, below in value.items() if below is not None}
        inner = ", ".join(f"{dotted([key])} = {inline(below)}" for key, below in known.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return toml_text({"x": value}).removeprefix("x = ").rstrip("\n")
