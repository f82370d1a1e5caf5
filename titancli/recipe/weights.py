"""`[model]` left out where `weights` is a Hugging Face folder: the folder's model is the recipe's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import EnvironmentProblem, TitanError
from titancli.recipe.layers import merge
from titancli.recipe.problems import Problems
from titancli.recipe.tree import Node, Origin, from_python
from titancli.recipe.urls import url_of

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

CONFIG = "config.json"
OWN = ("recipe.lock.toml", "manifest.json")
"""What lies in a run folder, and in a checkpoint, of which the first says its model."""


def model_of_weights(root: Node, registry: Registry, problems: Problems) -> tuple[Node, bool]:
    """The tree with the `[model]` that the folder's config.json describes; keys that stand in `[model]` win.

    Unchanged where `[model]` has a type, or there are no `weights`. The file is read with the recipe, so that
    a lock file, and each checkpoint, has the whole table. False, and a tree without `[model]`, where the
    weights give none: why is reported here.
    """
    weights, model = root.child("weights"), root.child("model")
    written = model is not None and (not isinstance(model.value, dict) or "type" in model.value)
    if written or weights is None or not isinstance(weights.value, str):
        return root, True
    try:
        found = _table(weights.value, registry)
    except TitanError as error:
        message = f"there is no [model], and that of the weights is not known: {error.message}"
        problems.add("check", message, weights.origin.location(), error.hint)
        return Node({key: node for key, node in root.value.items() if key != "model"}, root.origin), False
    at = weights.origin
    table = from_python(
        found, Origin("flavor", at.source, at.key, at.value, str(Path(weights.value) / CONFIG))
    )
    whole = table if model is None else merge(table, model, problems, ("model",))
    return Node({**root.value, "model": whole}, root.origin), True


def _table(weights: str, registry: Registry) -> dict[str, Any]:
    path = Path(weights) / CONFIG
    if any((path.parent / name).is_file() for name in OWN):
        raise EnvironmentProblem(
            f"{weights} is titan's own, and a Hugging Face folder alone gives a recipe its model",
            hint=f"add the [model] of {path.parent / OWN[0]}",
        )
    if url_of(Path(weights)) or not path.is_file():
        far = f"{weights} is no folder on this machine"
        raise EnvironmentProblem(
            far if url_of(Path(weights)) else f"there is no {path}",
            hint="name a Hugging Face folder (paths are relative to where the command is run), "
            "or add [model] with a type",
        )
    try:
        keys = json.loads(path.read_bytes())
        model_type = keys["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} is damaged, or names no model_type: {error}") from error
    readers = {
        name: cls
        for name, cls in registry.components("model")
        if model_type in getattr(cls, "model_types", ()) and hasattr(cls, "from_config_json")
    }
    if len(readers) != 1:
        who = f"{' and '.join(readers)} read" if readers else "no model of titan's own reads"
        types = [*readers] or ["hf_causal_lm"]
        raise EnvironmentProblem(
            f"{who} model_type {model_type!r}",
            hint=f'write [model] with type = "{types[0]}"'
            + ("" if readers else f' and config = "{path.parent}", if transformers has that model'),
        )
    [(name, cls)] = readers.items()
    try:
        return {"type": name, **cls.from_config_json(keys)}
    except (KeyError, TypeError, ValueError) as error:
        raise EnvironmentProblem(f"{path} lacks {error}, which {name} needs") from error
