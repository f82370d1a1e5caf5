"""From what a user calls a recipe to its file: a path, a run folder, or a name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from titancli.errors import RecipeError
from titancli.recipe.problems import nearest

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

LOCK_NAME = "recipe.lock.toml"
"""The resolved recipe in a run folder."""
NAMED = re.compile(r"(?P<plugin>[A-Za-z0-9][A-Za-z0-9_.-]*):(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)\Z")
"""`plugin:name`."""


def bundled_folder() -> Path:
    """The folder of titan's own recipes: inside the installed package, or else in the checkout.

    Raises:
        RecipeError: it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "bundled_recipes", package.parent / "recipes"):
        if folder.is_dir():
            return folder
    raise RecipeError("titan's own recipes are missing", hint="reinstall titancli")


def find_recipe(reference: str | Path, *, registry: Registry | None = None) -> Path:
    """The file of a recipe.

    A reference is a path if it contains a `/`, ends in `.toml`, or is a folder with a lock file; else it is
    the name of a recipe, `plugin:name` or just `name` while one plugin has it.

    Raises:
        RecipeError: there is no such recipe; the message names the nearest.
    """
    path = Path(reference)
    text = str(reference)
    if path.is_dir() and (path / LOCK_NAME).is_file():
        return path / LOCK_NAME
    if isinstance(reference, Path) or "/" in text or text.endswith(".toml"):
        return _existing(path)
    if registry is None:
        from titancli.registry import current

        registry = current()
    return named_recipe(text, registry)


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise RecipeError(
            f"{path} is a folder without {LOCK_NAME}", hint="name a recipe file or a run folder"
        )
    try:
        missing = not path.exists()
    except (OSError, ValueError):  # reading it will say what is wrong
        missing = False
    if missing:
        near = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        raise RecipeError(
            f"there is no recipe {path}",
            hint=nearest(path.name, near) or "`titan list-recipes` lists recipes that can be run by name",
        )
    return path


def named_recipe(reference: str, registry: Registry) -> Path:
    """The file of `plugin:name` or `name`.

    Raises:
        RecipeError: no plugin has it, or `name` alone is ambiguous.
    """
    folders = registry.recipe_folders()
    files = {f"{plugin}:{file.stem}": file for plugin, folder in folders for file in folder.glob("*.toml")}
    if ":" in reference:
        found = [reference] if reference in files else []
    else:
        found = sorted(name for name in files if name.partition(":")[2] == reference)
    if len(found) == 1:
        return files[found[0]]
    if found:
        hint = f"write {' or '.join(found)}"
        raise RecipeError(f"{reference!r} is the name of {len(found)} recipes", hint=hint)
    here = next((p for p in (Path(f"{reference}.toml"), Path(reference)) if p.is_file()), None)
    if here is not None:
        raise RecipeError(f"there is no recipe {reference!r}", hint=f"the file is called ./{here}")
    names = list(files) if ":" in reference else [name.partition(":")[2] for name in files]
    raise RecipeError(
        f"there is no recipe {reference!r}",
        hint=nearest(reference, names) or "`titan list-recipes` lists them; a file is given as ./FILE.toml",
    )
