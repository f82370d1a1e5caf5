"""`extends`: the recipes that a recipe builds on, merged under it, left to right."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from titancli.errors import Location, RecipeError
from titancli.recipe.find import NAMED, named_recipe
from titancli.recipe.layers import merge
from titancli.recipe.problems import Problems, nearest
from titancli.recipe.read import FORMAT, read_file
from titancli.recipe.tree import DEFAULT, Node

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry


def read_recipe(path: Path, registry: Registry, problems: Problems) -> Node:
    """A recipe file merged over all that it extends.

    Raises:
        RecipeError: one of the files cannot be read or is not TOML, is of another format version, or extends
            itself; the error holds the problems of all files.
    """
    root = _read(path, registry, problems, (), None)
    problems.raise_any()  # what stands in a file that was not read would be reported missing
    return root


def _read(
    path: Path, registry: Registry, problems: Problems, above: tuple[Path, ...], named_at: Location | None
) -> Node:
    root = read_file(path, problems, named_at)
    if root is None:
        return Node({}, DEFAULT)
    version = root.value.get("recipe")
    if version is not None and type(version.value) is int and version.value != FORMAT:
        message = f"this recipe has format {version.value}; this titan reads format {FORMAT}"
        problems.add("bad-format", message, version.origin.location(), "pip install --upgrade titancli")
    layers = [
        _base(reference, path, registry, problems, (*above, path.resolve()))
        for reference in _references(root, problems)
    ]
    layers.append(Node({k: v for k, v in root.value.items() if k != "extends"}, root.origin))
    return functools.reduce(lambda low, high: merge(low, high, problems), layers)


def _references(root: Node, problems: Problems) -> list[Node]:
    node = root.value.get("extends")
    if node is None:
        return []
    found = node.value if isinstance(node.value, list) else [node]
    for element in found:
        if not isinstance(element.value, str):
            hint = 'extends = "base.toml", or "titan:llama3_8b", or an array of these'
            problems.add("wrong-type", "extends must be text", element.origin.location(), hint)
    return [element for element in found if isinstance(element.value, str)]


def _base(
    reference: Node, path: Path, registry: Registry, problems: Problems, above: tuple[Path, ...]
) -> Node:
    """One base, merged over its own bases."""
    location = reference.origin.location()
    try:
        base = _find(reference.value, path.parent, registry)
    except RecipeError as error:
        problems.add("no-recipe", error.problems[0].message, location, error.problems[0].hint)
        return Node({}, DEFAULT)
    if base.resolve() in above:
        chain = [*above[above.index(base.resolve()) :], base]
        problems.add("cycle", f"{path} extends itself: {' -> '.join(p.name for p in chain)}", location)
        return Node({}, DEFAULT)
    return _read(base, registry, problems, above, location)


def _find(reference: str, folder: Path, registry: Registry) -> Path:
    if NAMED.match(reference) and not reference.endswith(".toml"):
        return named_recipe(reference, registry)
    base = folder / reference
    if not os.path.isfile(base):
        names = [p.name for p in base.parent.glob("*.toml")] if os.path.isdir(base.parent) else []
        hint = nearest(base.name, sorted(names)) or _named_hint(reference)
        raise RecipeError(f"there is no file {base}", hint=hint)
    return base


def _named_hint(reference: str) -> str | None:
    if "/" in reference or reference.endswith(".toml"):
        return None
    return f"a path is relative to this file; titan's own recipe would be titan:{reference}"
