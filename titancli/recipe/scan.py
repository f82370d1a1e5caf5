"""Where each key and value of a TOML text stands. No TOML library tells, and an error message needs it.

The scanner trusts that tomli has already accepted the text, so it only has to find the edges of things.
It reads TOML 1.1 (inline tables over several lines, trailing commas).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import tomli

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


def scan(text: str) -> Positions:
    """Find every key and value of a valid TOML text whose line ends are all `\\n`."""
    return _Scanner(text).run()


def match_key(text: str) -> tuple[list[str], int] | None:
    """The parts of the dotted key that a text begins with, and where it ends; None if there is none."""
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
        raise ValueError(f"no valid TOML at character {at}: {text[at : at + 20]!r}")
    return found.end()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.found = Positions()
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
