"""Recipes as JSON Schema (2020-12), for editors: what the installed plugins offer, with types and meanings.

A file that extends another need not be whole, so keys are required only where there is no `extends`. What a
schema cannot say (batch and mesh, versions, places) is for `titan validate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from titancli.errors import PluginError
from titancli.recipe.hints import needs_dataset, needs_tokenizer, recipe_slots
from titancli.recipe.schema import Recipe
from titancli.registry.component import SLOT, component_info
from titancli.registry.describe import field_docs, summary
from titancli.registry.kinds import KINDS

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema(registry: Registry) -> dict[str, Any]:
    """The JSON Schema of recipes that name what `registry` has.

    Raises:
        PluginError: the fields of a component cannot be bound; the message names it.
    """
    from pydantic import TypeAdapter

    from titancli.registry.binding import adapter
    from titancli.version import __version__

    components = registry.components()
    adapters: list[tuple[str, TypeAdapter[Any]]] = [("recipe", adapter(Recipe))]
    adapters += [(_key(name, cls), adapter(cls)) for name, cls in components]
    try:
        found, shared = TypeAdapter.json_schemas([(key, "validation", a) for key, a in adapters])
    except ValueError as error:  # pydantic's own are ValueErrors
        raise PluginError(f"the fields of a component have no JSON Schema: {error}") from error
    schemas = {key: schema for (key, _), schema in found.items()}
    definitions = {name: _relaxed(schema) for name, schema in shared.get("$defs", {}).items()}
    tables = {key: _body(schema, definitions) for key, schema in schemas.items()}
    root = tables.pop("recipe")
    for name, cls in components:
        definitions[_key(name, cls)] = _component(name, cls, tables[_key(name, cls)], registry)
    for kind in KINDS:
        definitions[f"slot.{kind}"], definitions[f"whole.{kind}"] = _slot(kind, registry)
    sections = {name: _section(schema) for name, schema in root["properties"].items()}
    return {
        "$schema": DIALECT,
        "$comment": f"written by titan {__version__}; plugins: {', '.join(_plugins(registry))}",
        "title": "titan recipe",
        "description": summary(Recipe),
        "type": "object",
        "properties": {"recipe": sections.pop("recipe"), "extends": EXTENDS, **sections},
        "additionalProperties": False,
        "if": {"not": {"required": ["extends"]}},
        "then": _whole_recipe(registry),
        "$defs": definitions,
    }


EXTENDS = {
    "description": "The recipe that this one builds on, or several, left to right: a path, or plugin:name.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def _key(name: str, cls: type) -> str:
    return f"{component_info(cls).kind}.{name.replace('/', '.')}"  # a / would need escaping in a reference


def _body(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The object that a class's schema is, where pydantic made a reference of it."""
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    return dict(definitions[name]) if name else _relaxed(schema)


def _relaxed(schema: Any) -> Any:
    """Without `required` (a base may have it) and null (TOML has none); slots refer to their kind."""
    if isinstance(schema, list):
        return [_relaxed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if SLOT in schema:
        return {"$ref": f"#/$defs/slot.{schema[SLOT]}"}
    left_out = ("required", "title", "properties")
    told = {key: _relaxed(item) for key, item in schema.items() if key not in left_out}
    if told.get("default", 0) is None:
        del told["default"]
    if "properties" in schema:  # a field may have any of these names
        told["properties"] = {key: _relaxed(item) for key, item in schema["properties"].items()}
    arms = [arm for arm in told.get("anyOf", []) if arm != {"type": "null"}]
    if len(arms) == 1:
        del told["anyOf"]
        return {**arms[0], **told}
    return {**told, "anyOf": arms} if arms else told


def _component(name: str, cls: type, table: dict[str, Any], registry: Registry) -> dict[str, Any]:
    """The table of one component."""
    added: dict[str, Any] = {"type": {"description": summary(cls), "enum": _names(name, cls, registry)}}
    if flavors := getattr(cls, "flavors", {}):
        added["flavor"] = {
            "description": "A row of values, which keys beside it change.",
            "enum": list(flavors),
        }
    docs = field_docs(cls)  # pydantic reads those of a class itself, and of none that it is built on
    fields = {
        key: {"description": docs[key], **field} if key in docs else field
        for key, field in table.get("properties", {}).items()
    }
    return {**table, "title": name, "properties": {**added, **fields}}


def _names(name: str, cls: type, registry: Registry) -> list[str]:
    """What the component is called in a recipe: its full name, and the bare one if no other has it."""
    bare = name.rpartition("/")[2]
    offered = [n for n in registry.names(component_info(cls).kind) if n.rpartition("/")[2] == bare]
    return [bare, name] if len(offered) == 1 else [name]


def _slot(kind: str, registry: Registry) -> tuple[dict[str, Any], dict[str, Any]]:
    """What may stand in a slot of a kind, and what must if no base says the rest of it."""
    names: list[str] = []
    ready: list[str] = []
    tables, wholes = [], []
    for name, cls in registry.components(kind):
        called = _names(name, cls, registry)
        required = _required(cls)
        names += called
        ready += [] if required else called
        tables.append({"$ref": f"#/$defs/{_key(name, cls)}"})
        whole: dict[str, Any] = {"type": "object", "properties": {"type": {"enum": called}}}
        if KINDS[kind].default not in called:
            whole["required"] = ["type"]
        if required and getattr(cls, "flavors", {}):
            whole["anyOf"] = [{"required": ["flavor"]}, {"required": required}]
        elif required:
            whole["required"] = [*whole.get("required", []), *required]
        wholes.append(whole)
    described = {"description": KINDS[kind].summary}
    return {**described, "anyOf": [{"enum": names}, *tables]}, {"anyOf": [{"enum": ready}, *wholes]}


def _required(cls: type) -> list[str]:
    missing = dataclasses.MISSING
    return [
        f.name
        for f in dataclasses.fields(cls)
        if f.init and f.default is missing and f.default_factory is missing
    ]


def _section(schema: dict[str, Any]) -> dict[str, Any]:
    """A key at the top; an array is never merged with a base's, so its components are whole."""
    reference = schema.get("items", {}).get("$ref", "")
    if not reference.startswith("#/$defs/slot."):
        return schema
    whole = {"$ref": reference.replace("/slot.", "/whole.")}
    return {**schema, "items": {"allOf": [schema["items"], whole]}}


def _whole_recipe(registry: Registry) -> dict[str, Any]:
    slots = {name: slot.kind for name, slot in recipe_slots().items() if name == slot.kind}
    defaults = {kind.name for kind in KINDS.values() if kind.default}
    properties: dict[str, Any] = {name: {"$ref": f"#/$defs/whole.{kind}"} for name, kind in slots.items()}
    required = [name for name in _required(Recipe) if name not in defaults and name != "model"]
    model = {"required": ["model"], "properties": {"model": properties.pop("model")}}
    for field in dataclasses.fields(Recipe):
        if field.name in required and field.name not in slots:
            properties[field.name] = {"required": _required_of(field.name)}
    needed = [
        {"if": {"required": ["weights"]}, "else": model},  # a folder of weights says which model it is
        _needed("tokenizer", registry, "dataset", needs_tokenizer),
        _needed("dataset", registry, "loop", needs_dataset),
    ]
    return {"required": required, "properties": properties, "allOf": needed}


def _needed(name: str, registry: Registry, kind: str, needs: Callable[[Any], bool]) -> dict[str, Any]:
    """That a recipe has a section, save with components of a kind that say that they need none."""
    wanted: dict[str, Any] = {"required": [name]}
    without = [
        called
        for full, cls in registry.components(kind)
        if not needs(cls)
        for called in _names(full, cls, registry)
    ]
    if not without:
        return wanted
    table = {"type": "object", "required": ["type"], "properties": {"type": {"enum": without}}}
    component = {kind: {"anyOf": [{"enum": without}, table]}}
    return {"if": {"required": [kind], "properties": component}, "else": wanted}


def _required_of(section: str) -> list[str]:
    from titancli.recipe.hints import fields_of

    return _required(fields_of(Recipe)[section])


def _plugins(registry: Registry) -> list[str]:
    return [f"{p.name} {p.version}" if p.version else p.name for p in registry.plugins if p.state == "ok"]
