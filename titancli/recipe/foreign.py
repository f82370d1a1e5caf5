"""Keys and files of other trainers, as plugins know them; asked only after a mistake was found."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from titancli.errors import Problem, RecipeError
from titancli.files import read_bytes
from titancli.recipe.toml import KeyPath, dotted
from titancli.registry.first_party import COMMANDS

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

YAML = (".yaml", ".yml")
FORMER = {"length_index": "dataset.cache_tokens"}
"""Keys that titan had, and what took their place."""
LARGEST = 1 << 20
"""Maximum size in bytes of a file that plugins are shown."""


def hint_for_path(path: KeyPath, registry: Registry) -> str | None:
    """Return a hint for a dotted key that another trainer has in this section; None for any other."""
    return registry.foreign_keys().get(dotted(path)) if len(path) > 1 else None


def in_titan(name: str, registry: Registry, value: str = "") -> tuple[str | None, str] | None:
    """Return titan's key for a key of another trainer, if its value means the same, and a hint.

    Args:
        name: `learning_rate`, `learning-rate`.
        value: as an override has it, to be shown in the override to write; may be empty.

    Returns:
        None for a name that no plugin knows.
    """
    name = name.lower().replace("-", "_")
    said = FORMER.get(name) or registry.foreign_keys().get(name)
    if said is None:
        return None
    if not re.fullmatch(r"[a-z_0-9.]+", said):
        return None, f"in titan: {said}"
    return said, f"in titan: {said}={value}" if value else f"in titan: {said}"


def refuse_foreign(path: Path, registry: Registry) -> None:
    """Refuse a file that is another trainer's config, or YAML.

    Raises:
        RecipeError: it is one; the hint is the command that converts it.
    """
    try:
        text = read_bytes(path, LARGEST).decode("utf-8-sig", "replace")
    except OSError:  # reported where it is read as a recipe
        return
    if found := registry.foreign_config(text):
        tool, command = found
        hint = f"convert it: titan {command} {shlex.quote(str(path))} OUT.toml"
        raise RecipeError(
            [Problem("foreign-config", f"{path} is a config of {tool}, not a recipe of titan", hint=hint)]
        )
    if path.suffix.lower() in YAML:
        known = ", ".join(f"titan {name}" for name in COMMANDS if name.startswith("recipe from-"))
        raise RecipeError(
            [
                Problem(
                    "foreign-config",
                    f"{path} is YAML, and a recipe is TOML",
                    hint=f"to convert another trainer's config: {known}; `titan recipe new` begins a recipe",
                )
            ]
        )
