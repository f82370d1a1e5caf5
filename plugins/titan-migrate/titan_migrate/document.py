"""A YAML file as its values, each with its line. Nothing in the file is executed, and no tag makes an object.

Numbers such as `1e-5` are floats, as in YAML 1.2 and in OmegaConf, and not text as in YAML 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from titancli.errors import Location, Problem, RecipeError
from titancli.files import regular

LONGEST = 1 << 18
"""Bytes of a file that is read, and characters of its values when each alias is replaced by what it names."""
MOST = 20_000
"""Values of a file that is read."""
DEEPEST = 50
FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?\Z
    |[-+]?(?:[0-9][0-9_]*)[eE][-+]?[0-9]+\Z
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?\Z
    |[-+]?\.(?:inf|Inf|INF)\Z
    |\.(?:nan|NaN|NAN)\Z""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Leaf:
    """A value that is no table, and no list of tables."""

    path: tuple[str, ...]
    """Keys, and numbers of elements, from the top."""
    value: Any
    line: int
    """1-based line of its key."""

    @property
    def name(self) -> str:
        return ".".join(self.path)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's floats, and with dates as text."""


_FLOAT_TAG, _DATE_TAG = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in (_FLOAT_TAG, _DATE_TAG)]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_FLOAT_TAG, FLOAT, list("-+0123456789."))


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Return an integer that a recipe can hold; Python writes none of more than 4,300 digits."""
    value: int = loader.construct_yaml_int(node)
    if not -(2**63) <= value < 2**63:
        raise OverflowError
    return value


def _string(loader: _Loader, node: yaml.ScalarNode) -> str:
    """Return a text that can be written; an escape may be half a character."""
    value: str = loader.construct_yaml_str(node)
    value.encode()
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:str", _string)


def read(path: Path) -> list[Leaf]:
    """Return the values of a YAML file, in its order.

    Raises:
        RecipeError: it cannot be read, is not YAML, is empty, holds no table, or sets a key twice.
    """
    text = _text(path)
    shown = str(path)
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise _error("empty", f"{shown} is empty", "give a training config")
            if not isinstance(root, yaml.MappingNode):
                raise _error("not-a-table", f"{shown} holds no keys", "a config has lines of KEY: VALUE")
            if _written_out(root, {}) > LONGEST:
                message = f"{shown} has more than {LONGEST:,} characters when its aliases are written out"
                raise _error("too-large", message, "an alias (*NAME) must not name many others")
            found = []
            for leaf in _Walk(loader, shown, text).leaves(root):
                found.append(leaf)
                if len(found) > MOST:
                    message = f"{shown} has more than {MOST:,} values"
                    raise _error("too-large", message, "does an alias hold another one?")
            return found
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise _explained(shown, text, error) from error
    except (OverflowError, ValueError) as error:  # an escape that is no character
        raise _error("syntax", f"{shown} is not YAML: {error}", None) from error
    except RecursionError as error:
        raise _error("syntax", f"{shown} is nested too deeply", None) from error


def _text(path: Path) -> str:
    try:
        with open(path, "rb", opener=regular) as opened:
            raw = opened.read(LONGEST + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _error("unreadable", f"cannot read {path}: {reason}", None) from error
    if len(raw) > LONGEST:
        message = f"{path} has more than {LONGEST:,} bytes"
        raise _error("too-large", message, "is it a config, or a data set?")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        message = f"{path}:{line} is not UTF-8: {error.reason}"
        raise _error("not-utf8", message, "save it as UTF-8") from error


def _error(code: str, message: str, hint: str | None, at: Location | None = None) -> RecipeError:
    return RecipeError([Problem(code, message, at, hint)])


def _place(shown: str, text: str, mark: Any, length: int = 1) -> Location:
    lines = text.split("\n")
    line = min(mark.line, len(lines) - 1)
    return Location(shown, line + 1, mark.column + 1, max(1, length), lines[line])


def _explained(shown: str, text: str, error: yaml.YAMLError) -> RecipeError:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or next(iter(str(error).splitlines()), "it cannot be parsed")
    context = getattr(error, "context", None)
    if "expected a single document" in (context or ""):
        return _error("documents", f"{shown} holds several documents", "split it at the lines of ---")
    hint = None
    if "'\\t'" in what:
        hint = "YAML is indented with spaces, not with tabs"
    elif "undefined alias" in what:
        hint = "an anchor (&NAME) stands before its aliases (*NAME)"
    elif "constructor for the tag" in what:
        hint = "titan makes no objects of what a file names: write the plain value"
    at = None if mark is None else _place(shown, text, mark)
    return _error("syntax", f"{shown} is not YAML: {what}", hint, at)


class _Walk:
    """Walks through nodes, and refuses what two readers would read differently."""

    def __init__(self, loader: _Loader, shown: str, text: str) -> None:
        self._loader, self._shown, self._text = loader, shown, text
        self._open: list[Any] = []

    def leaves(self, node: Any, at: tuple[str, ...] = (), line: int = 1) -> Iterator[Leaf]:
        if any(node is one for one in self._open) or len(self._open) > DEEPEST:
            place = _place(self._shown, self._text, node.start_mark)
            raise _error("syntax", f"{'.'.join(at)} holds itself, or is nested too deeply", None, place)
        self._open.append(node)
        if isinstance(node, yaml.MappingNode) and node.value:
            for key, value in self._pairs(node):
                yield from self.leaves(value, (*at, self._name(key)), key.start_mark.line + 1)
        elif isinstance(node, yaml.SequenceNode) and any(_is_table(one) for one in node.value):
            for number, one in enumerate(node.value):
                yield from self.leaves(one, (*at, str(number)), one.start_mark.line + 1)
        else:
            yield Leaf(at, self._value(node, at), line)
        self._open.pop()

    def _value(self, node: Any, at: tuple[str, ...]) -> Any:
        """Return what a node says; PyYAML raises of all kinds for `!!int abc`, `0x_` and the like."""
        try:
            return self._loader.construct_object(node, deep=True)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            place = _place(self._shown, self._text, node.start_mark)
            kind = str(node.tag).rpartition(":")[2]
            what = f"the value of {'.'.join(at)} cannot be read as {kind}"
            raise _error("syntax", what, "write it in quotes if it is text", place) from error

    def _name(self, key: Any) -> str:
        if not isinstance(key, yaml.ScalarNode):
            place = _place(self._shown, self._text, key.start_mark)
            raise _error("syntax", "a key is a list or a table", "keys are words", place)
        try:
            key.value.encode()
        except UnicodeEncodeError as error:
            place = _place(self._shown, self._text, key.start_mark)
            raise _error("syntax", "a key holds half a character", "keys are words", place) from error
        return str(key.value)

    def _pairs(self, node: Any) -> list[tuple[Any, Any]]:
        """Return the keys and values of a table, those of `<<` included."""
        seen: dict[str, Any] = {}
        for key, _ in node.value:
            name = self._name(key)
            if name in seen and name != "<<":
                place = _place(self._shown, self._text, key.start_mark, len(name))
                first = seen[name].start_mark.line + 1
                raise _error(
                    "duplicate-key", f"{name} is set twice: in line {first}, too", "remove one", place
                )
            seen[name] = key
        if "<<" not in seen:
            return list(node.value)
        self._loader.flatten_mapping(node)
        merged = {self._name(key): (key, value) for key, value in node.value}  # a table's own keys come last
        return list(merged.values())


def _written_out(node: Any, known: dict[int, int]) -> int:
    """Return the characters of a node's values, those of an alias as often as it is used.

    Args:
        known: the result of each node, by id; a node that holds itself, which is refused later, has 0.
    """
    if isinstance(node, yaml.ScalarNode):
        return len(node.value) + 1
    if id(node) not in known:
        known[id(node)] = 0
        mapping = isinstance(node, yaml.MappingNode)
        below = (one for pair in node.value for one in pair) if mapping else iter(node.value)
        known[id(node)] = 1 + sum(_written_out(one, known) for one in below)
    return known[id(node)]


def _is_table(node: Any) -> bool:
    return isinstance(node, yaml.MappingNode) and bool(node.value)
