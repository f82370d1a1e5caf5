"""The problem in a text that is not TOML: its line, and a fix. Imported only after an error."""

from __future__ import annotations

import re

import tomli

from titancli.errors import Problem
from titancli.recipe.problems import SWITCHES
from titancli.recipe.toml import KeyPath, Positions, Source, Span, dotted, scan

FORMS = "a line is KEY = VALUE, [SECTION], or a comment that begins with #"
LOOKED_AT = 500
"""Number of lines before an error that are searched for the start of its statement."""
_LONG = "'''"


def explain(source: Source, error: tomli.TOMLDecodeError) -> Problem:
    """Return the problem in a text, given the error that parsing it raised."""
    text, message = source.text, error.msg
    # What is missing at the end of the file is missing after its last line's text.
    at = min(error.pos, len(text.rstrip("\n")))
    span, hint = (at, at + 1), None
    if message.startswith(("Cannot", "Duplicate")):
        if (twice := _declared_twice(source, at)) is not None:
            return twice
    elif message.startswith(("Unclosed", "Unterminated", f"Expected {_LONG!r}")) or _goes_on(
        text, message, at
    ):
        message, span, hint = _unclosed(source, message, at)
    elif message in ("Illegal character '\\n'", 'Expected "\'"'):
        start = _open_quote(text, at)
        message, span, hint = "unterminated string", (start, at), f"close it with {text[start]}"
    elif message == "Invalid value":
        hint = _value_hint(_rest(text, at))
    elif message.startswith("Expected newline"):
        hint = _after_value(text, at)
    elif message.startswith("Expected '='"):
        hint = _without_equals(text, at)
    elif message.startswith("Expected ']"):
        hint = f"close it with {']]' if ']]' in message else ']'}"
    elif message.startswith("Unescaped"):
        hint = r"write \\ for a backslash, or put the text in single quotes"
    elif message == "Invalid statement":
        hint = f"this is JSON, and a recipe is TOML: {FORMS}" if text[at : at + 1] == "{" else FORMS
    return Problem("syntax", message[:1].lower() + message[1:], source.location(span), hint)


def _rest(text: str, at: int) -> str:
    return text[at:].partition("\n")[0].strip()


class _InOrder(dict[KeyPath, Span]):
    """A dict substitute that keeps every assignment, including a second one to a key."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[KeyPath, Span]] = []

    def __setitem__(self, path: KeyPath, span: Span) -> None:
        self.all.append((path, span))
        super().__setitem__(path, span)


def _declared_twice(source: Source, at: int) -> Problem | None:
    """Return the problem of a key or table declared twice; None if the text has another error too."""
    found = _InOrder()
    end = source.text.find("\n", at)
    try:
        scan(source.text[: end if end >= 0 else None], Positions(values=found))
    except (ValueError, IndexError):  # no TOML either in the rest of this line
        return None
    around = [entry for entry in found.all if entry[1][0] <= at <= entry[1][1]]
    if not around:
        return None
    path, span = min(around, key=lambda entry: entry[1][1] - entry[1][0])
    header = source.text[span[0]] == "[" and source.text[: span[0]].rpartition("\n")[2].strip() == ""
    if header and isinstance(path[-1], int):
        path = path[:-1]
    before = [entry for entry in found.all if entry[1][0] < span[0] and entry[1] != span]
    same = [entry for entry in before if entry[0] == path]
    within = [entry for entry in before if entry[0][: len(path)] == path]
    outer = [entry for entry in before if path[: len(entry[0])] == entry[0]][-1:]
    first = next(iter(same or within or outer), None)
    if first is None:
        return None
    lines = [source.location(each).line for each in (first[1], span)]
    where = f"line {lines[0]} and {lines[1]}" if lines[0] != lines[1] else f"both in line {lines[0]}"
    name = f"[{dotted(path)}]" if header else dotted(path)
    hint = "keep one of the two, with all its keys" if header else "remove one of the two"
    return Problem("syntax", f"{name} is declared twice: {where}", source.location(span), hint)


def _unclosed(source: Source, message: str, at: int) -> tuple[str, Span, str]:
    """Return message, place and hint for a bracket or quote that is not closed."""
    text = source.text
    first, _, named = message.partition(" ")
    what = {"Unclosed": named, "Invalid": "array"}.get(first, "string")
    rest = _rest(text, at)
    if what == "array" and re.match(r"[\"'\d{+-]|\[(?![\w.\" -]+\]+\s*(#|\Z))", rest):
        return "a comma is missing in an array", (at, at + 1), "elements are separated by commas"
    start = _value(text, at)
    end = {"array": "]", "inline table": "}"}.get(what, text[start : start + 3])
    line = source.location((start, start + 1)).line
    return f"unclosed {what}: it begins in line {line}", (start, start + 1), f"close it with {end}"


def _goes_on(text: str, message: str, at: int) -> bool:
    """Return whether an invalid value is in fact the next key or header, or the end, after an unclosed
    array."""
    if message != "Invalid value" or text[_value(text, at)] != "[":
        return False
    line = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
    return not _rest(text, at) or bool(re.match(r"\s*([\w.\"-]+\s*=|\[+[\w.\" -]+\]+\s*(#|\Z))", line))


def _value(text: str, at: int) -> int:
    """Return the start of the value in the incomplete statement."""
    start = _statement(text, at)
    equals = re.compile(r"=[ \t]*").search(text, start, at)
    return equals.end() if equals and equals.end() < len(text) else start


def _open_quote(text: str, at: int) -> int:
    """Return the start of the string that the end of a line cuts off."""
    start = text.rfind("\n", 0, at) + 1
    closed = r"""\"(?:[^"\\]|\\.)*"|'[^']*'"""
    line = re.sub(closed, lambda found: " " * len(found.group()), text[start:at])
    quote = re.search("[\"']", line)
    return start + quote.start() if quote else at


def _statement(text: str, at: int) -> int:
    """Return the start of the incomplete statement: the text before it is valid TOML."""
    start = text.rfind("\n", 0, at) + 1
    for _ in range(LOOKED_AT):
        try:
            tomli.loads(text[:start])
            break
        except tomli.TOMLDecodeError:
            start = text.rfind("\n", 0, start - 1) + 1
    return start


def _value_hint(value: str) -> str:
    """Return the fix for an invalid value."""
    value = re.split(r"\s+#", value)[0].rstrip(", ]}")
    if not value or value[0] == "#":
        return "a value follows the =; for the default, remove the key"
    if value.lower() in SWITCHES:
        return f"write {SWITCHES[value.lower()]}"
    if value.lower() in ("none", "null", "nil", "~"):
        return "TOML has no null: for the default, remove the key"
    if re.fullmatch(r"[+-]?\.\d+\S*", value):
        return f"write {value.replace('.', '0.', 1)}"
    if value[0] in "“”‘’":
        return f'use straight quotes: "{value.strip("“”‘’")}"'
    if re.match(r"[+-]?\d", value):
        return f'a number is written 10, 0.5 or 1e-4; for a string, put quotes around it: "{value}"'
    return f'put quotes around a string: "{value}"'


def _after_value(text: str, at: int) -> str | None:
    """Return the fix for extra text after a value."""
    rest, before = _rest(text, at), text[:at]
    value = re.split(r"[=\n]", before)[-1].strip()
    if not rest:  # a carriage return, or the like
        return None
    if rest[0] in ",;":
        return f"remove the {rest[0]}"
    if rest.startswith(("//", "--")):
        return "a comment begins with #"
    if re.match(r"[\w.-]+\s*=", rest):
        return "each key has its own line"
    if value[:1] in ('"', "'"):
        return (
            f"inside {value[0]}…{value[0]} there can be no {value[0]}: use the other quotes for one of them"
        )
    if rest == ".":
        return f"write {value}.0"
    if re.fullmatch(r"[+-]?0", value) and rest.isdecimal():
        return f"write {rest.lstrip('0') or 0}"
    gap = " " if before[-1:].isspace() else ""
    return _value_hint(f"{value}{gap}{rest}")


def _without_equals(text: str, at: int) -> str:
    """Return the fix for a key without a =."""
    key = re.split(r"[\n{,]", text[:at])[-1].strip()
    rest = _rest(text, at)
    if rest.startswith(":"):
        value = rest[1:].strip()
        return f"write {key} = {value.rstrip('}')}" if value else f"a section is written [{key}]"
    return FORMS
