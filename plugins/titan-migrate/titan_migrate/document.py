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

LONGEST = 1 << 20
"""Bytes of a file that is read."""
MOST = 20_000
"""Values of a file that is read; aliases of aliases make more of a few lines."""
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
    except RecursionError as error:
        raise _error("syntax", f"{shown} is nested too deeply", None) from error


def _text(path: Path) -> str:
    try:
        with path.open("rb") as opened:
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
            yield Leaf(at, self._loader.construct_object(node, deep=True), line)
        self._open.pop()

    def _name(self, key: Any) -> str:
        if not isinstance(key, yaml.ScalarNode):
            place = _place(self._shown, self._text, key.start_mark)
            raise _error("syntax", "a key is a list or a table", "keys are words", place)
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


def _is_table(node: Any) -> bool:
    return isinstance(node, yaml.MappingNode) and bool(node.value)
