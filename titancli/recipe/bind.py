"""Binding of a tree to a Recipe, with pydantic's errors in terms of the recipe."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import RecipeError
from titancli.recipe.find import url_of
from titancli.recipe.merge import without
from titancli.recipe.problems import SWITCHES, Problems, did_you_mean, nearest, nearest_name
from titancli.recipe.read import quoting, taken_as_text
from titancli.recipe.resolve import VALIDATION, Resolved
from titancli.recipe.schema import Recipe, needs_dataset, needs_tokenizer, recipe_slots
from titancli.recipe.toml import KeyPath, Node, dotted
from titancli.registry.component import is_config
from titancli.registry.fields import Type, fields_of, required_fields

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden", "no_such_attribute")
MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")


def bind_recipe(
    resolved: Resolved, registry: Registry, problems: Problems, *, runnable: bool = True
) -> tuple[Recipe, frozenset[KeyPath]]:
    """Bind a recipe. Values that do not fit get their defaults; their paths are returned too.

    Raises:
        RecipeError: a value that does not fit has no default, or there were problems before; all are in it.
        PluginError: a component's class cannot be bound at all.
    """
    from pydantic import ValidationError

    from titancli.registry.binding import bind

    wanted = {
        "tokenizer": any(map(needs_tokenizer, _datasets(resolved))),
        "dataset": ("loop",) not in resolved.holes and needs_dataset(resolved.classes.get(("loop",))),
    }
    absent: list[KeyPath] = [(n,) for n, needed in wanted.items() if needed and n not in resolved.root.value]
    missing = [{"type": "missing", "loc": path} for path in (*absent, *_unset(resolved)) if runnable]
    found_before, wrong = bool(problems), set[KeyPath]()
    try:
        recipe = bind(Recipe, resolved.root.plain(resolved.holes), registry)
    except ValidationError as error:
        wrong = _report([*error.errors(include_url=False), *missing], resolved, registry, problems)
        if found_before or missing or not wrong:
            raise RecipeError(problems.sorted()) from None
        root = resolved.root
        for path in wrong:
            root, _ = without(root, path)
        try:
            recipe = bind(Recipe, root.plain(), registry)
        except ValidationError:
            raise RecipeError(problems.sorted()) from None
        return absolute(recipe), frozenset(wrong)
    _report(missing, resolved, registry, problems)
    problems.raise_any()
    return absolute(recipe), frozenset()


def _unset(resolved: Resolved) -> Iterator[KeyPath]:
    """Yield the fields of sections that a recipe must set, and does not, although they have a default."""
    for name, node in resolved.root.value.items():
        sections = fields_of(Recipe)[name].type.tables if name in fields_of(Recipe) else []
        for field in (field for section in sections for field in fields_of(section).values()):
            mark = field.type.marked_required
            if mark and isinstance(node.value, dict) and not {field.name, mark.unless} & node.value.keys():
                yield name, field.name


def _datasets(resolved: Resolved) -> list[type | None]:
    """Return the classes of the datasets in use; None stands for a missing one."""
    held_out = [cls for path, cls in resolved.classes.items() if path[:2] == VALIDATION and len(path) == 3]
    needed = not held_out or needs_dataset(resolved.classes.get(("loop",)))
    return [*([resolved.classes.get(("dataset",))] if needed else []), *held_out]


def absolute(value: Any) -> Any:
    """Return the value with every Path made absolute: relative to the working directory, `~` expanded; URLs
    stay."""
    if isinstance(value, Path):
        return value if url_of(value) else Path(os.path.expanduser(value)).absolute()
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


def _report(
    errors: Iterable[Any], resolved: Resolved, registry: Registry, problems: Problems
) -> set[KeyPath]:
    """Report one problem for each value that is wrong, however many alternatives of a union it fails.

    Returns:
        The paths of these values, and of the keys that misspelt ones probably mean. None of missing ones.
    """
    by_value: dict[KeyPath, list[Mistake]] = {}
    missing: dict[KeyPath, Node] = {}
    misspelt: set[KeyPath] = set()
    unknown: set[KeyPath] = set()
    for error in errors:
        node, path = resolved.root.follow(error["loc"])
        beyond = error["loc"][len(path) :]
        if any((*path, *beyond)[: len(hole)] == hole for hole in resolved.holes):
            continue
        if error["type"] in UNKNOWN and not beyond:
            misspelt.add(_unknown_key(path, node, resolved, registry, problems))
            unknown.add(path)
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
        choices = resolved.types.get(path, Type(Any)).choices
        code, message, hint = describe(path, node, mistakes, choices)
        problems.add(code, message, node.origin.location(), hint)
    return {*by_value, *unknown, *misspelt}


def _unknown_key(
    path: KeyPath, node: Node, resolved: Resolved, registry: Registry, problems: Problems
) -> KeyPath:
    """Report an unknown key; return the path of the known key that it probably means, or None."""
    from titancli.recipe.foreign import hint_for_path, in_titan

    table, key = path[:-1], str(path[-1])
    cls = resolved.classes.get(table)
    known = list(fields_of(cls)) if cls else []
    if cls is not None and is_config(cls):
        known += ["type", "flavor"] if cls.flavors else ["type"]
    if cls is not None and is_config(cls) and key == "name":
        hint: str | None = "a component is selected by its type: set type = …"
    else:
        hint = hint_for_path(path, registry) or _belongs(key, node, table, resolved, known)
    given = node.origin.text if node.origin.kind == "override" else ""
    theirs = None if hint else in_titan(key, registry, given or "")
    meant = None if hint or theirs else nearest_name(key, known)
    hint = hint or (theirs[1] if theirs else did_you_mean(meant))
    if hint is None and known and table:
        hint = f"known: {', '.join(known)}" if len(known) <= 12 else None
    if not table and isinstance(node.value, (dict, list)):
        message = f"unknown section [{key}]"
    else:
        message = f"unknown key {key!r} in {_name(table, cls, registry)}" if table else f"unknown key {key!r}"
    problems.add("unknown-key", message, node.origin.location("key"), hint)
    return tuple((theirs[0] or "").split(".")) if theirs else (*table, meant or "")


def _belongs(key: str, node: Node, table: KeyPath, resolved: Resolved, known: list[str]) -> str | None:
    """Return a hint that says where a key is known: another section, another slot's component, or the top
    level; a value that no section can have under its name is one of a known key that is misspelt."""
    override = node.origin.text if node.origin.kind == "override" else ""
    if table and key in fields_of(Recipe):
        if fields_of(Recipe)[key].type.tables and not isinstance(node.value, (dict, list)):
            return did_you_mean(nearest_name(key, known))
        top = "this key belongs at the top, before the first [section]"
        return f"write {key}={override}" if override else top
    homes = []
    for name, field in fields_of(Recipe).items():
        classes = [resolved.classes[(name,)]] if (name,) in resolved.classes else field.type.tables
        if (name,) != table and any(key in fields_of(cls) for cls in classes):
            homes.append(name)
    unique = len(homes) == 1 or homes[:1] == ["training"]
    if not unique:
        return None
    return f"write {homes[0]}.{key}={override}" if override else f"this key belongs in [{homes[0]}]"


def _missing_key(
    path: KeyPath, node: Node, resolved: Resolved, registry: Registry, problems: Problems
) -> None:
    table, key = path[:-1], str(path[-1])
    location = node.origin.location("key")
    if table:
        name = _name(table, resolved.classes.get(table), registry)
        hint = f"add: {key} = …" if isinstance(table[-1], int) else f"add to [{dotted(table)}]: {key} = …"
        field = fields_of(cls).get(key) if (cls := resolved.classes.get(table)) else None
        if field and (mark := field.type.marked_required) and mark.unless:
            hint += f", or {mark.unless} = …"
        problems.add("missing-key", f"{name} needs {key!r}", location, hint)
        return
    slot = recipe_slots().get(key)
    if slot is not None:
        example = f"[{key}] with a type, one of: {registry.choices(slot.kind)}"
        if key == "model":
            example += "; or weights = HF_FOLDER, to use the model of that folder"
    else:
        needed = [name for section in fields_of(Recipe)[key].type.tables for name in required_fields(section)]
        example = f"[{key}] with {', '.join(needed)}"
    problems.add("missing-key", f"the recipe has no [{key}]", location, f"add {example}")


def _rank(path: KeyPath, resolved: Resolved) -> int:
    """Return the position of a field in its class."""
    cls = resolved.classes.get(path[:-1])
    return list(fields_of(cls)).index(str(path[-1])) if cls else 0


def _name(table: KeyPath, cls: type | None, registry: Registry) -> str:
    """Return a table's name for messages: `training`, `model (titan/llama3)`."""
    if cls is not None and is_config(cls):
        return f"{dotted(table)} ({registry.full_name(cls)})"
    return dotted(table)


# ------------------------------------------------------------------------------ what a value should have been


TYPES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "path": "a path (a string)",
    "list": "an array",
    "tuple": "an array",
    "set": "an array",
    "frozen_set": "an array",
    "dict": "a table",
    "mapping": "a table",
    "dataclass": "a table",
    "model_attributes": "a table",
}
LIMITS = {
    "greater_than": ("gt", "more than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
    "multiple_of": ("multiple_of", "a multiple of {}"),
    "too_short": ("min_length", "an array of at least {}"),
    "too_long": ("max_length", "an array of at most {}"),
    "string_too_short": ("min_length", "a string of at least {} characters"),
    "string_too_long": ("max_length", "a string of at most {} characters"),
    "string_pattern_mismatch": ("pattern", "a string that matches {}"),
}


@dataclass(frozen=True)
class Mistake:
    """One of pydantic's errors about one value."""

    code: str
    expected: str
    """The type of value expected: `an integer`. Empty if `message` says everything."""
    message: str = ""

    @classmethod
    def of(cls, error: Any, *, in_table: bool) -> Mistake:
        """`in_table`: the error lies in one alternative's own fields, below what the recipe's data names."""
        kind, context = error["type"], error.get("ctx", {})
        name = re.sub(r"_(type|parsing|from_float)\Z", "", kind)
        if kind in ("literal_error", "enum"):
            return cls("bad-choice", f"one of {context['expected']}")
        if kind in LIMITS:
            key, words = LIMITS[kind]
            limit = context[key]
            return cls("out-of-range", words.format(f"{limit:g}" if isinstance(limit, float) else limit))
        if name in TYPES and not in_table:
            return cls("wrong-type", TYPES[name])
        if kind == "none_required":
            return cls("wrong-type", "left out")
        return cls("bad-value", "", str(context["error"]) if kind == "value_error" else error["msg"])


def describe(
    path: KeyPath, node: Node, mistakes: list[Mistake], choices: list[Any]
) -> tuple[str, str, str | None]:
    """Return code, message and hint for all errors about one value."""
    expected = list(dict.fromkeys(mistake.expected for mistake in mistakes if mistake.expected))
    codes = {mistake.code for mistake in mistakes}
    # Of several alternatives the one that the value comes nearest to says what is wrong.
    like_a_choice = any(type(choice) is type(node.value) for choice in choices)
    ranking = (
        "out-of-range",
        *(("bad-choice",) if like_a_choice else ()),
        "wrong-type",
        "bad-choice",
        "bad-value",
    )
    code = next(c for c in ranking if c in codes)
    if not expected:
        messages = dict.fromkeys(mistake.message for mistake in mistakes)
        return code, f"{dotted(path)}: {'; or '.join(messages)}", None
    words = " or ".join(re.sub(r"\Aone of (?=\S+\Z)", "", text) for text in expected)
    written = repr(node.value) if code == "bad-choice" and isinstance(node.value, str) else shown(node)
    return code, f"{dotted(path)} must be {words}, not {written}", _hint(path, node, expected, choices)


def shown(node: Node) -> str:
    """Return a value as it was written, shortened."""
    if isinstance(node.value, dict):
        return "a table"
    text = node.origin.text
    if isinstance(node.value, list):
        return f"the array {text}" if text and len(text) <= 40 and "\n" not in text else "an array"
    if isinstance(node.value, str):
        short = node.value if len(node.value) <= 40 else node.value[:39] + "…"
        return f"the string {json.dumps(short, ensure_ascii=False)}"
    return str(node.value).lower() if isinstance(node.value, bool) else str(text or node.value)


def _hint(path: KeyPath, node: Node, expected: list[str], choices: list[Any]) -> str | None:
    value = node.value
    override = node.origin.kind == "override"
    if isinstance(value, str):
        if taken := taken_as_text(node):
            return taken
        texts = [choice for choice in choices if isinstance(choice, str)]
        if near := nearest(value, texts):
            return near
        if "true or false" in expected and value.lower() in SWITCHES:
            return f"use {SWITCHES[value.lower()]}"
        wants_number = "an integer" in expected or "a number" in expected
        if wants_number and re.fullmatch(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", value):
            return f"write {value} without quotes"
        if "an array" in expected:
            return f'write ["{value}"]' if not override else f"""write '{dotted(path)}=["{value}"]'"""
        return None
    if "a string" in expected or any(isinstance(choice, str) for choice in choices):
        if not isinstance(value, (dict, list)):
            return f"for a string, put quotes around it: {quoting(node)}"
        return None
    if isinstance(value, float) and "an integer" in expected and value.is_integer():
        return f"use {int(value)}"
    if "an array" in expected and isinstance(value, dict):
        if override:
            return "there is no array here whose elements could be changed; give the whole array"
        return f"an array of tables starts with [[{dotted(path)}]]"
    if "an array" in expected:
        return f"write [{node.origin.text or value}]"
    return None
