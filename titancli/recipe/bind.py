"""From resolved data to a Recipe; what pydantic finds wrong becomes problems with places and hints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import RecipeError
from titancli.recipe.expected import Mistake, describe
from titancli.recipe.hints import arms, bare, fields_of, needs_dataset, needs_tokenizer, recipe_slots
from titancli.recipe.moved import moved
from titancli.recipe.problems import Problems, did_you_mean, nearest_name
from titancli.recipe.resolve import Resolved
from titancli.recipe.scan import KeyPath
from titancli.recipe.schema import Recipe
from titancli.recipe.tree import Node, dotted
from titancli.recipe.urls import url_of
from titancli.registry.component import component_info

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden", "no_such_attribute")
MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")


def bind_recipe(resolved: Resolved, registry: Registry, problems: Problems) -> Recipe:
    """Bind everything.

    Raises:
        RecipeError: something does not fit, or there were problems before; it holds them all.
        PluginError: a component's class cannot be bound at all.
    """
    from pydantic import ValidationError

    from titancli.registry.binding import bind

    wanted = {
        "tokenizer": needs_tokenizer(resolved.classes.get(("dataset",))),
        "dataset": needs_dataset(resolved.classes.get(("loop",))),
    }
    without = [name for name, needed in wanted.items() if needed and name not in resolved.root.value]
    missing = [{"type": "missing", "loc": (name,)} for name in without]
    try:
        recipe = bind(Recipe, resolved.root.plain(resolved.holes), registry)
    except ValidationError as error:
        _report([*error.errors(include_url=False), *missing], resolved, registry, problems)
        raise RecipeError(problems.sorted()) from None
    _report(missing, resolved, registry, problems)
    problems.raise_any()
    return absolute(recipe)


def absolute(value: Any) -> Any:
    """The same value with every Path made absolute: relative ones lie where the command is run. URLs stay."""
    if isinstance(value, Path):
        return value if url_of(value) else value.absolute()
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(absolute(item) for item in value)
    if isinstance(value, dict):
        return {key: absolute(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        new = {name: absolute(item) for name, item in old.items()}
        changed = {name: item for name, item in new.items() if item is not old[name] and item != old[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _report(errors: Iterable[Any], resolved: Resolved, registry: Registry, problems: Problems) -> None:
    """One problem for each value that is wrong, however many alternatives of a union it fails."""
    by_value: dict[KeyPath, list[Mistake]] = {}
    missing: dict[KeyPath, Node] = {}
    misspelt: set[KeyPath] = set()
    for error in errors:
        node, path = resolved.root.follow(error["loc"])
        beyond = error["loc"][len(path) :]
        if any((*path, *beyond)[: len(hole)] == hole for hole in resolved.holes):
            continue
        if error["type"] in UNKNOWN and not beyond:
            meant = _unknown_key(path, node, resolved, registry, problems)
            misspelt.add((*path[:-1], meant or ""))
        elif error["type"] in MISSING and len(beyond) == 1:
            if path not in resolved.incomplete:
                missing[(*path, str(beyond[0]))] = node
        else:
            in_table = isinstance(node.value, (dict, list)) and len(beyond) > 1
            by_value.setdefault(path, []).append(Mistake.of(error, in_table=in_table))
    for path in sorted(missing, key=lambda path: _rank(path, resolved)):
        if path not in misspelt:
            _missing_key(path, missing[path], resolved, registry, problems)
    for path, mistakes in by_value.items():
        node, _ = resolved.root.follow(path)
        code, message, hint = describe(path, node, mistakes)
        problems.add(code, message, node.origin.location(), hint)


def _unknown_key(
    path: KeyPath, node: Node, resolved: Resolved, registry: Registry, problems: Problems
) -> str | None:
    """Report a key; the known key that it probably means."""
    table, key = path[:-1], str(path[-1])
    cls = resolved.classes.get(table)
    known = list(fields_of(cls)) if cls else []
    if cls is not None and _is_component(cls):
        known += ["type", "flavor"] if hasattr(cls, "flavors") else ["type"]
    if cls is not None and _is_component(cls) and key == "name":
        hint: str | None = "a component is named by its type: write type = …"
    else:
        hint = moved(path) or _belongs(key, table, resolved)
    meant = None if hint else nearest_name(key, known)
    hint = hint or did_you_mean(meant)
    if hint is None and known and table:
        hint = f"known: {', '.join(known)}" if len(known) <= 12 else None
    if not table and isinstance(node.value, (dict, list)):
        message = f"unknown section [{key}]"
    else:
        message = f"unknown key {key!r} in {_name(table, cls, registry)}" if table else f"unknown key {key!r}"
    problems.add("unknown-key", message, node.origin.location("key"), hint)
    return meant


def _belongs(key: str, table: KeyPath, resolved: Resolved) -> str | None:
    """Where else a key is known: in another section, in the component of another slot, or at the top."""
    if table and key in fields_of(Recipe):
        return "this key belongs at the top, before the first [section]"
    homes = []
    for name, hint in fields_of(Recipe).items():
        classes = [arm for arm in map(bare, arms(hint)) if dataclasses.is_dataclass(arm)]
        if (name,) in resolved.classes:
            classes = [resolved.classes[(name,)]]
        if (name,) != table and any(key in fields_of(cls) for cls in classes):  # type: ignore[arg-type]
            homes.append(name)
    return f"this key belongs to [{homes[0]}]" if len(homes) == 1 else None


def _missing_key(
    path: KeyPath, node: Node, resolved: Resolved, registry: Registry, problems: Problems
) -> None:
    table, key = path[:-1], str(path[-1])
    location = node.origin.location("key")
    if table:
        name = _name(table, resolved.classes.get(table), registry)
        hint = f"add: {key} = …" if isinstance(table[-1], int) else f"add to [{dotted(table)}]: {key} = …"
        problems.add("missing-key", f"{name} needs {key!r}", location, hint)
        return
    slot = recipe_slots().get(key)
    if slot is not None:
        names = [name.rpartition("/")[2] for name in registry.names(slot.kind)]
        example = f"[{key}] with a type, one of: {', '.join(names[:8]) or 'none is installed'}"
        if key == "model":
            example += "; or weights = HF_FOLDER, whose model it then is"
    else:
        section = fields_of(Recipe)[key]
        needed = [f.name for f in dataclasses.fields(section) if _is_required(f)]
        example = f"[{key}] with {', '.join(needed)}"
    problems.add("missing-key", f"the recipe has no [{key}]", location, f"add {example}")


def _rank(path: KeyPath, resolved: Resolved) -> int:
    """The place of a field in its class."""
    cls = resolved.classes.get(path[:-1])
    return list(fields_of(cls)).index(str(path[-1])) if cls else 0


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_component(cls: type) -> bool:
    return hasattr(cls, "__component__")


def _name(table: KeyPath, cls: type | None, registry: Registry) -> str:
    """How a table is called in a message: `training`, `model (titan/llama3)`."""
    if cls is not None and _is_component(cls) and component_info(cls):
        return f"{dotted(table)} ({registry.full_name(cls)})"
    return dotted(table)
