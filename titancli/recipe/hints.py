"""What the type annotations of a config class say about the data it is bound from."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any

from titancli.recipe.schema import Recipe
from titancli.registry.component import Slot
from titancli.registry.defaults import DatasetConfigDefaults, with_defaults


@functools.cache
def fields_of(cls: type) -> dict[str, Any]:
    """The fields of a config class with their annotations, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def slot_of(hint: Any) -> Slot | None:
    """The slot that an annotation is, if it is one (`... | None` included)."""
    for arm in arms(hint):
        if typing.get_origin(arm) is typing.Annotated:
            for mark in typing.get_args(arm)[1:]:
                if isinstance(mark, Slot):
                    return mark
    return None


def arms(hint: Any) -> Iterator[Any]:
    """The alternatives of a union without None; of anything else, itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for arg in typing.get_args(hint):
            yield from arms(arg)
    elif hint is not type(None):
        yield hint


def bare(hint: Any) -> Any:
    """An annotation without `Annotated[...]`."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def false_literal(hint: Any, value: Any) -> Any | None:
    """The `Literal` choice that equals a value of another type (`1` and `true`, `-1` and `-1.0`).

    pydantic takes such a value even in strict mode.
    """
    kinds = [bare(arm) for arm in arms(hint)]
    choices = [
        arg for kind in kinds if typing.get_origin(kind) is typing.Literal for arg in typing.get_args(kind)
    ]
    equal = [choice for choice in choices if choice == value]
    if not equal or type(value) in (*kinds, *map(type, equal)):
        return None
    return equal[0]


def element_of(hint: Any, key: str | int) -> Any | None:
    """The annotation of one element of a list, tuple or dict annotation; None for anything else."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if not isinstance(origin, type) or not args:
        return None
    if origin is tuple and isinstance(key, int) and args[-1] is not Ellipsis:
        return args[key] if key < len(args) else None
    if issubclass(origin, dict) and isinstance(key, str):
        return args[-1]
    if isinstance(key, int) and not issubclass(origin, dict):
        return args[0]
    return None


def needs_tokenizer(dataset: Any) -> bool:
    """Whether a dataset's config, or its class, wants a tokenizer: all do that do not say otherwise."""
    return with_defaults(DatasetConfigDefaults, dataset).needs_tokenizer


def needs_dataset(loop: Any) -> bool:
    """Whether a loop's config, or its class, wants a dataset: all do that have no `task`."""
    return "task" not in getattr(loop, "__dataclass_fields__", {})


@functools.cache
def recipe_slots() -> dict[str, Slot]:
    """The component slots of a recipe: single ones, and the arrays of them."""
    found = {}
    for name, hint in fields_of(Recipe).items():
        slot = slot_of(hint) or slot_of(element_of(hint, 0))
        if slot is not None:
            found[name] = slot
    return found
