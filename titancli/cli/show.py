"""`titan show`: a component, or a section of recipes, and its fields."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import click

from titancli.cli.completion import ComponentName
from titancli.cli.component_lookup import find_component
from titancli.cli.output import print_json
from titancli.errors import UsageError, nearest_name
from titancli.recipe.schema import Recipe, default_type, recipe_slots
from titancli.recipe.toml import inline
from titancli.registry import current
from titancli.registry.component import component_info, is_config
from titancli.registry.fields import Field, fields_of, nested_fields, plain


@click.command("show", short_help="Show the fields of a component or section.")
@click.argument("name", metavar="KIND/NAME|SECTION|KEY", type=ComponentName())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(name: str, as_json: bool) -> None:
    """Show the fields of a component or of a recipe's SECTION: type, default, meaning, and flavors.

    KIND may be omitted if the name is unique; NAME may be a full name, PLUGIN/NAME. KEY is one of a
    recipe, as an override has it: weights, training.steps.
    """
    if (key := _key(name)) is not None:
        if as_json:
            row = {"kind": "key", "name": name, "target": None, "doc": key.doc, "fields": [_row(key)]}
            print_json("component", {"component": {**row, "flavors": {}}})
        else:
            _print_key(name, key)
        return
    config = _section(name) or find_component(name)
    if as_json:
        print_json("component", {"component": _document(config)})
    else:
        _print(config)


def _key(name: str) -> Field | None:
    """Return a key of a recipe outside a component, as `weights`, `training.steps`, or a default component's
    key.

    Raises:
        UsageError: the section has no such key.
    """
    first, _, rest = name.partition(".")
    top = fields_of(Recipe).get(first)
    if top is None or (not rest and top.type.tables):
        return None
    if not rest:
        return top
    slot = recipe_slots().get(first)
    default = default_type(first)
    config = current().find(slot.kind, default) if slot and default else _section(first)
    known = {field.name: field for field in nested_fields(config)} if config else {}
    if rest not in known:
        near = nearest_name(rest, known)
        of_one = f"`titan show {slot.kind}/NAME` lists the keys of one" if slot else None
        hint = of_one or (near and f"did you mean {first}.{near}?") or f"`titan show {first}` lists its keys"
        raise UsageError(f"{first} has no key {rest!r} of its own", hint=hint)
    return known[rest]


def _print_key(name: str, key: Field) -> None:
    _print_field(replace(key, name=name), indent="")
    slot = recipe_slots().get(name)
    if slot is not None:
        known = current().choices(slot.kind)
        print(f"    One of: {known}. `titan show {slot.kind}/NAME` shows its fields.")


def _section(name: str) -> type | None:
    """Return the class of a recipe's section, such as `training`."""
    field = fields_of(Recipe).get(name)
    return next(iter(field.type.tables), None) if field else None


def _label(config: type) -> tuple[str, str, str | None]:
    """Return kind, name and target of a component; the name of a section."""
    if is_config(config):
        info = component_info(config)
        return info.kind, current().full_name(config), info.target
    name = next(name for name, field in fields_of(Recipe).items() if config in field.type.tables)
    return "section", name, None


def _document(config: type) -> dict[str, Any]:
    kind, name, target = _label(config)
    return {
        "kind": kind,
        "name": name,
        "target": target,
        "doc": inspect.cleandoc(config.__doc__ or ""),
        "fields": [_row(field) for field in nested_fields(config)],
        "flavors": plain(getattr(config, "flavors", {})),
    }


def _print(config: type) -> None:
    kind, name, _ = _label(config)
    print(f"{kind} {name}")
    print(inspect.cleandoc(config.__doc__ or ""))
    fields = nested_fields(config)
    print("\nFields" if fields else "\nIt has no fields.")
    for field in fields:
        _print_field(field, indent="  ")
    flavors = plain(getattr(config, "flavors", {}))
    if flavors:
        print("\nFlavors")
        for flavor, values in flavors.items():
            print(f"  {flavor}: {', '.join(f'{key} = {inline(value)}' for key, value in values.items())}")


def _print_field(field: Field, *, indent: str) -> None:
    print(f"{indent}{field.name}: {field.type}{_default(field)}")
    for line in field.doc.splitlines():
        print(f"{indent}    {line}")


def _row(field: Field) -> dict[str, Any]:
    return {
        "name": field.name,
        "type": str(field.type),
        "required": field.required,
        "default": field.default,
        "doc": field.doc,
    }


def _default(field: Field) -> str:
    if field.required:
        return " (required)"
    return "" if field.default is None else f" = {inline(field.default)}"
