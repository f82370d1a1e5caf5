"""A job config during translation: its fields, their lines, and the results so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from titan_torchtitan.fields import FIELDS, Field
from titan_torchtitan.older import GONE, RENAMED
from titancli import Recipe
from titancli.recipe import KeyPath, Node, dotted, nearest
from titancli.registry.fields import fields_of


@dataclasses.dataclass(frozen=True)
class Entry:
    """A field that is set in the job."""

    name: str
    """Name as written in the job; `field.name` is the name in torchtitan 0.2.2."""
    field: Field
    value: Any
    line: int


@dataclasses.dataclass(frozen=True)
class Remark:
    """A remark about one field."""

    name: str
    line: int | None
    """None for a field that is not set in the job."""
    value: Any
    text: str


class Job:
    """Reads fields by torchtitan 0.2.2's names, and collects the recipe and the remarks."""

    def __init__(self, root: Node) -> None:
        self.recipe: dict[str, Any] = {}
        self.lost: list[Remark] = []
        """Fields that the recipe does not carry over."""
        self.changed: list[Remark] = []
        """Fields that the recipe expresses differently, or more precisely."""
        self.idle: list[Remark] = []
        """Fields without a counterpart whose values match what titan does anyway."""
        self.moved: set[str] = set()
        """Names, as written, that the recipe carries over."""
        self.entries: dict[str, Entry] = {}
        for path, node in _leaves(root):
            self._read(path, node)

    def _read(self, path: KeyPath, node: Node) -> None:
        written = dotted(path)
        location = node.origin.location("key")
        line = location.line if location else 1
        value = node.plain()
        name = RENAMED.get(written, written)
        field = FIELDS.get(name) or GONE.get(name)
        if field is None:
            near = _nearest(written)
            text = "torchtitan 0.2.2 has no such field" + (
                f": {near}" if near else "; is it from a custom config module?"
            )
            self.lost.append(Remark(written, line, value, text))
        elif not _fits(value, field.types):
            words = " or ".join(kind.__name__ for kind in field.types)
            self.lost.append(Remark(written, line, value, f"torchtitan expects {words} here"))
        elif name in self.entries:
            other = self.entries[name]
            self.lost.append(
                Remark(written, line, value, f"{other.name} in line {other.line} sets the same value")
            )
        else:
            self.entries[name] = Entry(written, field, value, line)

    def value(self, name: str) -> Any:
        """Return a field's value: as set in the job, or torchtitan's default."""
        entry = self.entries.get(name)
        return entry.value if entry else (FIELDS.get(name) or GONE[name]).default

    def written(self, name: str) -> bool:
        return name in self.entries

    def put(self, key: str, value: Any, *sources: str) -> None:
        """Set a key of the recipe; `sources` are the fields that it comes from."""
        table = self.recipe
        *above, last = key.split(".")
        for part in above:
            table = table.setdefault(part, {})
        table[last] = value
        self.take(*sources)

    def take(self, *names: str) -> None:
        """Mark fields as carried over."""
        self.moved.update(self.entries[name].name for name in names if name in self.entries)

    def lose(self, name: str, why: str) -> None:
        """Mark a field as not carried over, with the reason."""
        self.lost.append(self._remark(name, why))

    def change(self, name: str, how: str) -> None:
        """Mark a field as expressed differently, with the explanation."""
        self.take(name)
        self.changed.append(self._remark(name, how))

    def ignore(self, name: str) -> None:
        """Mark a field as matching what titan does anyway."""
        self.idle.append(self._remark(name, ""))

    def _remark(self, name: str, text: str) -> Remark:
        entry = self.entries.get(name)
        if entry is not None:
            return Remark(entry.name, entry.line, entry.value, text)
        return Remark(name, None, self.value(name), text)


def _nearest(written: str) -> str | None:
    """Return a hint that names a similar field of the same section, or of a similar section."""
    section, _, name = written.rpartition(".")
    names = [known.rpartition(".")[2] for known in FIELDS if known.rpartition(".")[0] == section]
    return nearest(name, names) if names else nearest(written, FIELDS)


def has_key(key: str) -> bool:
    """Return whether recipes have a key; keys in a component's table count as existing."""
    cls: Any = Recipe
    for part in key.split("."):
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            return True
        field = fields_of(cls).get(part)
        if field is None:
            return False
        cls = field.type.alternatives[0]
    return True


def _leaves(node: Node, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Yield every value below the tables of a config; an array is one value, and empty sections yield
    nothing."""
    if isinstance(node.value, dict):
        for key, below in node.value.items():
            yield from _leaves(below, (*at, key))
    else:
        yield at, node


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in types
    if isinstance(value, list):
        return list in types and all(isinstance(item, (str, list)) for item in value)
    return isinstance(value, types)
