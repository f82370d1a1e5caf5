"""From a reference (a path, a run folder, or a name) to a recipe file; and URLs in place of paths."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from titancli.errors import Problem, RecipeError
from titancli.recipe.problems import nearest
from titancli.registry.kinds import KINDS
from titancli.runs import LOCK_NAME

if TYPE_CHECKING:
    from titancli.recipe.toml import Node
    from titancli.registry.lookup import Registry

LOCK_HEADER = "# A resolved recipe, written by titan"
"""First words of a resolved recipe."""
NAMED = re.compile(r"(?P<plugin>[A-Za-z0-9][A-Za-z0-9_.-]*):(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)\Z")
"""`plugin:name`."""


BESIDE = "recipe:"
"""Prefix of a path that is relative to the recipe file it is written in."""


def beside(node: Node) -> str:
    """Return a path as text; a prefix `recipe:` becomes the folder of the file it is written in.

    Raises:
        RecipeError: it has the prefix, and is not written in a file.
    """
    text: str = node.value
    if not text.startswith(BESIDE):
        return text
    source = node.origin.source
    if node.origin.kind != "file" or source is None:
        hint = "give a path; relative paths start at the current folder"
        raise RecipeError(f"{text!r}: {BESIDE} stands for the folder of a recipe file", hint=hint)
    return os.path.join(os.path.dirname(os.path.abspath(source.path)), text.removeprefix(BESIDE).lstrip("/"))


def bundled_folder() -> Path:
    """Return the folder of titan's own recipes: inside the installed package, or in the checkout.

    Raises:
        RecipeError: neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "bundled_recipes", package.parent / "recipes"):
        if folder.is_dir():
            return folder
    raise RecipeError("titan's bundled recipes are missing", hint="reinstall titancli")


def find_recipe(reference: str | Path, *, registry: Registry | None = None) -> Path:
    """Return the file of a recipe.

    A reference is a path if it contains a `/`, ends in `.toml`, `.yaml` or `.yml`, or is a folder with a lock
    file; else it is the name of a recipe, `plugin:name` or just `name` while one plugin has it.

    Raises:
        RecipeError: there is no such recipe; the message names the nearest.
    """
    path = Path(reference)
    text = str(reference)
    if os.path.isfile(path / LOCK_NAME):
        return path / LOCK_NAME
    if isinstance(reference, Path) or "/" in text or text.endswith((".toml", ".yaml", ".yml")):
        return _existing(path)
    if registry is None:
        from titancli.registry import current

        registry = current()
    return named_recipe(text, registry)


def _existing(path: Path) -> Path:
    if os.path.isdir(path):
        raise _no_recipe(f"{path} is a folder without a {LOCK_NAME}", "give a recipe file or a run folder")
    try:
        missing = not path.exists()
    except (OSError, ValueError):  # reading it will say what is wrong
        missing = False
    if missing:
        names = (
            [p.name for p in path.parent.glob("*.toml") if p.exists()] if os.path.isdir(path.parent) else []
        )
        hint = nearest(path.name, sorted(names)) or "`titan recipe list` lists the recipes that have a name"
        raise _no_recipe(f"recipe {path} does not exist", hint)
    return path


def named_recipe(reference: str, registry: Registry) -> Path:
    """Return the file of `plugin:name` or `name`.

    Raises:
        RecipeError: no plugin has it, or `name` alone is ambiguous.
    """
    folders = registry.recipe_folders()
    files = {f"{plugin}:{file.stem}": file for plugin, folder in folders for file in folder.rglob("*.toml")}
    if ":" in reference:
        found = [reference] if reference in files else []
    else:
        found = sorted(name for name in files if name.partition(":")[2] == reference)
    if len(found) == 1:
        return files[found[0]]
    if found:
        raise _no_recipe(f"{reference!r} is the name of {len(found)} recipes", f"write {' or '.join(found)}")
    if absent := registry.absent(reference.partition(":")[0]):
        raise _no_recipe(f"recipe {reference!r} comes with {absent[0]}", absent[1])
    here = next((path for path in (f"{reference}.toml", reference) if os.path.isfile(path)), None)
    names = list(files) if ":" in reference else [name.partition(":")[2] for name in files]
    hint = f"for the file, write ./{here}" if here else nearest(reference, names)
    hint = hint or "`titan recipe list` lists them; for a file, write ./FILE.toml"
    raise _no_recipe(f"there is no recipe {reference!r}", hint)


def _no_recipe(message: str, hint: str | None) -> RecipeError:
    return RecipeError([Problem("no-recipe", message, hint=hint)])


# ------------------------------------------------------------------------------------------------------- URLs


_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+")


def store_type(url: str, registry: Registry) -> str:
    """Return the full name of the store that a URL belongs to: the one named like its scheme, or `fsspec`.

    Raises:
        PluginError: several plugins have a store of this name.
    """
    scheme = url.partition("://")[0]
    if any(name.rpartition("/")[2] == scheme for name in registry.names("store")):
        return registry.full_name(registry.find("store", scheme))
    return str(KINDS["store"].full_default)


def url_of(path: Path) -> str | None:
    """Return the URL that a path was written as, or None; a Path has lost some of its slashes."""
    match = _URL.match(str(path))
    if match is None:
        return None
    root = "/" if match[1] in ("file", "local") else ""
    return f"{match[1]}://{root}{str(path)[match.end() :]}"
