"""The lock file: a recipe with every default filled in, which runs again as it is."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import PluginError
from titancli.recipe.tree import Node
from titancli.recipe.urls import url_of
from titancli.version import __version__

if TYPE_CHECKING:
    from titancli.recipe.load import Loaded
    from titancli.registry.lookup import Registry


HEADER = "# A resolved recipe, written by titan"


def lock_text(loaded: Loaded) -> str:
    """A recipe's resolved data as TOML 1.0. Loading it gives the same data."""
    import tomli_w

    header = f"{HEADER} {__version__}. It runs again as it is: titan train THIS_FILE"
    return f"{header}\n{tomli_w.dumps(loaded.data)}"


def resolved_data(recipe: Any, root: Node, registry: Registry) -> dict[str, Any]:
    """The plain TOML data of a bound recipe: defaults filled in, full component names, None left out.

    Raises:
        PluginError: a component holds a value that TOML cannot.
    """
    return _table(recipe, root, registry)


def _table(config: Any, node: Node | None, registry: Registry) -> dict[str, Any]:
    table: dict[str, Any] = {}
    if hasattr(config, "__component__"):
        table["type"] = registry.full_name(type(config))
        flavor = node.child("flavor") if node else None
        if flavor is not None:
            table["flavor"] = flavor.value
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.init and value is not None:
            table[field.name] = _plain(value, node.child(field.name) if node else None, registry)
    return table


def _plain(value: Any, node: Node | None, registry: Registry) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _table(value, node, registry)
    if isinstance(value, Path):
        return url_of(value) or str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, dict):
        below = {k: _plain(v, node.child(k) if node else None, registry) for k, v in value.items()}
        return {key: item for key, item in below.items() if item is not None}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item, None, registry) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, node.child(i) if node else None, registry) for i, item in enumerate(value)]
    raise PluginError(f"a config holds {value!r}, a {type(value).__name__}, which a recipe cannot")
