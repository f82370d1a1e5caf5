"""The config.json of a Hugging Face folder, which anybody may have written. Torch-free."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.files import read_json

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
