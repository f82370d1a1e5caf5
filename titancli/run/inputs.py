"""The files and folders that a recipe's components read, found by the types of their fields. Torch-free."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from titancli.recipe.assets import Assets
from titancli.recipe.find import url_of
from titancli.recipe.schema import Recipe
from titancli.registry.component import component_info, configs, is_config
from titancli.registry.fields import fields_of

WRITERS = ("logger", "launcher")
"""Kinds of components whose paths are written."""


def missing_inputs(recipe: Recipe) -> list[str]:
    """Return what components would read and is not there, a line each.

    An input is a `Path`, or a text marked as `LocalPath` that is absolute; a pattern must match something.
    """
    return [
        f"{key}: no file matches {value}" if glob.has_magic(value) else f"{key}: {value} does not exist"
        for key, value in _inputs(recipe)
        if not (os.path.exists(value) or (glob.has_magic(value) and _matches(value)))
    ]


def how_to_get(missing: list[str], recipe: Recipe) -> str:
    """Return what to do about missing inputs: a line that downloads them, if the recipe has `assets`."""
    tokenizer = getattr(recipe.tokenizer, "path", None)
    lacks = any(line.startswith(("tokenizer.path:", "weights:")) for line in missing)
    if recipe.assets is None or not isinstance(tokenizer, Path) or not lacks:
        return "relative paths start at the current folder"
    return f"download it: {Assets(recipe.assets, tokenizer, recipe.weights == tokenizer).command}"


def _matches(pattern: str) -> bool:
    return next(glob.iglob(pattern, recursive=True), None) is not None


def _inputs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for path, config in configs(recipe):
        if not is_config(config) or component_info(config).kind in WRITERS:
            continue
        kind: type = type(config)
        for name, field in fields_of(kind).items():
            value = getattr(config, name)
            for item in value if isinstance(value, (list, tuple)) else [value]:
                is_path = isinstance(item, Path) and url_of(item) is None
                if is_path or (field.type.local_path and isinstance(item, str) and os.path.isabs(item)):
                    yield ".".join(map(str, (*path, name))), str(item)
