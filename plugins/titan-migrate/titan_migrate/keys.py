"""How a tool's keys are described: what each may hold, its default, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NUMBER = (float, int)
TEXT, FLAG, WHOLE, LIST, ANY = (str,), (bool,), (int,), (list,), (str, bool, int, float, list, dict)


@dataclass(frozen=True)
class Key:
    """A key of a config, or all keys of a pattern."""

    name: str
    """Dotted; `*` stands for the number of an element, and at the end for the rest of a name."""
    types: tuple[type, ...]
    default: Any = None
    to: str | None = None
    """Key of the recipe that takes the value as it is."""
    why: str = ""
    """Reason to report if the value is not carried over."""
    same: tuple[Any, ...] = ()
    """Values that change nothing in what titan trains."""
    says: str = ""
    """For the page: what it becomes, if code reads it together with others."""
    idle: bool = False
    """True if no value changes what is trained."""


def carried(name: str, types: tuple[type, ...], default: Any, to: str, same: Iterable[Any] = ()) -> Key:
    """Describe a key that the recipe has, too."""
    return Key(name, types, default, to=to, same=tuple(same))


def dropped(name: str, types: tuple[type, ...], why: str, default: Any = None, same: Any = ()) -> Key:
    """Describe a key that the recipe has not; `same` are values that are no loss."""
    return Key(name, types, default, why=why, same=(default, *same))


def part(name: str, types: tuple[type, ...], default: Any, says: str) -> Key:
    """Describe a key that code reads, together with others."""
    return Key(name, types, default, says=says)


def idle(names: str, why: str) -> list[Key]:
    """Describe keys, separated by blanks, that change nothing in what is trained."""
    return [Key(name, ANY, why=why, idle=True) for name in names.split()]


def gone(names: str, why: str, *same: Any) -> list[Key]:
    """Describe keys, separated by blanks, that titan has nothing for, for one reason; off is no loss."""
    return [Key(name, ANY, why=why, same=(None, False, [], *same)) for name in names.split()]


def table(*groups: Iterable[Key] | Key) -> dict[str, Key]:
    """Return keys by name."""
    found: dict[str, Key] = {}
    for group in groups:
        for key in [group] if isinstance(group, Key) else group:
            assert key.name not in found, f"{key.name} is described twice"
            found[key.name] = key
    return found


def described(name: str, keys: dict[str, Key]) -> Key | None:
    """Return the description of a key: its own, that of any element, or the longest pattern's."""
    if name in keys:
        return keys[name]
    parts = ["*" if part.isdecimal() else part for part in name.split(".")]
    general = ".".join(parts)
    if general in keys:
        return keys[general]
    patterns = [key for key in keys if key.endswith("*") and general.startswith(key[:-1])]
    return keys[max(patterns, key=len)] if patterns else None


def fits(value: Any, types: tuple[type, ...]) -> bool:
    """Return whether a value is of one of these types; a whole number is a float, too."""
    if isinstance(value, bool):
        return bool in types
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return False
    return isinstance(value, types)
