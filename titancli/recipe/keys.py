"""The keys that an override can name, and what may stand after their `=`; for completion in shells."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from titancli.errors import PluginError
from titancli.recipe.hints import arms, bare, element_of, fields_of, slot_of
from titancli.recipe.schema import Recipe
from titancli.registry.kinds import KINDS

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry


def override_keys(data: Mapping[str, Any], registry: Registry) -> dict[str, list[str]]:
    """Dotted keys with the values that they may have, as far as these can be counted.

    Args:
        data: a resolved recipe's, whose components' keys are then among them; or nothing.
    """
    return dict(_fields(Recipe, data, registry, ""))


def _fields(
    cls: type, data: Mapping[str, Any], registry: Registry, above: str
) -> Iterator[tuple[str, list[str]]]:
    for name, hint in fields_of(cls).items():
        yield from _value(hint, data.get(name), registry, f"{above}{name}")


def _value(hint: Any, data: Any, registry: Registry, key: str) -> Iterator[tuple[str, list[str]]]:
    slot = slot_of(hint)
    if slot is not None:
        yield from _slot(slot.kind, data, registry, key)
        return
    choices: list[str] = []
    for arm in map(bare, arms(hint)):
        inner = element_of(arm, 0)
        if dataclasses.is_dataclass(arm):
            yield from _fields(arm, data if isinstance(data, dict) else {}, registry, f"{key}.")  # type: ignore[arg-type]
            return
        if inner is not None and isinstance(data, list):
            for i, element in enumerate(data):
                yield from _value(inner, element, registry, f"{key}.{i}")
        if arm is bool:
            choices += ["true", "false"]
        elif typing.get_origin(arm) is typing.Literal:
            choices += map(str, typing.get_args(arm))
    yield key, choices


def _slot(kind: str, data: Any, registry: Registry, key: str) -> Iterator[tuple[str, list[str]]]:
    names = registry.names(kind)
    yield key, _shortest(names)
    name = data.get("type") if isinstance(data, dict) else KINDS[kind].default
    try:
        cls = registry.find(kind, name) if isinstance(name, str) else None
    except PluginError:
        return  # the recipe itself will say so
    if cls is None:
        return
    if flavors := getattr(cls, "flavors", {}):
        yield f"{key}.flavor", list(flavors)
    yield from _fields(cls, data if isinstance(data, dict) else {}, registry, f"{key}.")


def _shortest(names: list[str]) -> list[str]:
    """Bare names where only one plugin has them, else full ones."""
    bare_names = [name.rpartition("/")[2] for name in names]
    return [b if bare_names.count(b) == 1 else name for name, b in zip(names, bare_names, strict=True)]
