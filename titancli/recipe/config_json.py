"""The config.json of a Hugging Face folder, which anybody may have written. Torch-free."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import EnvironmentProblem
from titancli.files import read_json
from titancli.registry.component import component_info

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

LARGEST = 1 << 24
"""Bytes of a config.json that is read."""


def config_json(path: Path) -> dict[str, Any]:
    """Return the keys of a config.json, of which `model_type` is a text.

    Raises:
        EnvironmentProblem: it cannot be read, is damaged, or has no such model_type.
    """
    try:
        keys = read_json(path, LARGEST)
        if not isinstance(keys, dict):
            raise ValueError("it is not an object")
        named = keys.get("model_type")
        if named is None:
            raise ValueError("there is no key of that name")
        if not isinstance(named, str):
            raise ValueError(f"{reprlib.repr(named)} is not a text")
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} is damaged, or has no model_type: {error}") from error
    return keys


def fields_in(path: Path, reader: Any, keys: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the keys of `[model]` that a model reads from a config.json; see `model_fields`.

    Raises:
        EnvironmentProblem: the model `name` does not support it, or a key is missing or makes no sense; names
            the file.
    """
    try:
        return model_fields(reader, keys)
    except ValueError as error:
        raise EnvironmentProblem(f"{name} cannot read {path}: {error}", hint="download it again") from error


def bind_model(
    cls: type,
    fields: Mapping[str, Any],
    where: Path,
    keys: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> Any:
    """Return a model's config from fields of `[model]`, bound as strictly as a recipe.

    Args:
        where: the file that they are from.
        keys: the config.json that they were read from; None: the file holds the fields themselves.

    Raises:
        EnvironmentProblem: a value does not fit; names the file and its key.
    """
    from pydantic import ValidationError

    from titancli.registry import current
    from titancli.registry.binding import bind

    try:
        return bind(cls, fields, registry or current())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        key = None if keys is None or not hasattr(cls, "key_in") else cls.key_in(keys, place)
        raise EnvironmentProblem(
            f"{where} does not fit the model {component_info(cls).name}: {key or place} is "
            f"{reprlib.repr(first['input'])}: {first['msg']}",
            hint="correct that value, or download the folder again",
        ) from error


def model_fields(reader: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `[model]` that a model, which declares `from_config_json`, reads from a config.json.

    Raises:
        EnvironmentProblem: the model does not support it.
        ValueError: it lacks a key, or a value is of another type or makes no sense.
    """
    try:
        return dict(reader.from_config_json(keys))
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}") from error
    except (ArithmeticError, AttributeError, IndexError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"config.json has a value that makes no sense: {error}") from error
