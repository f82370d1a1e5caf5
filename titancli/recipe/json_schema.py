"""Recipes for editors and shells: JSON Schema, the keys that an override can name, a template.

The schema (2020-12) has what the installed plugins offer, with types and meanings. A file that extends
another need not be whole, so keys are required only where there is no `extends`. What a schema cannot say
(batch and mesh, versions, places) is for `titan validate`.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from titancli.errors import PluginError
from titancli.recipe.schema import Recipe, default_type, needs_dataset, needs_tokenizer
from titancli.recipe.toml import comment, inline
from titancli.registry.component import component_info
from titancli.registry.defaults import ConfigDefaults
from titancli.registry.fields import SLOT, Field, Type, fields_of, required_fields, summary
from titancli.registry.kinds import KINDS

if TYPE_CHECKING:
    from titancli.recipe.load import Loaded
    from titancli.registry.lookup import Registry

# ------------------------------------------------------------------------------------------------ JSON Schema


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema(registry: Registry) -> dict[str, Any]:
    """Return the JSON Schema of recipes that use the components of `registry`.

    Raises:
        PluginError: the fields of a component cannot be bound; the message names it.
    """
    from pydantic import TypeAdapter

    from titancli.registry.binding import adapter
    from titancli.version import __version__

    components = registry.components()
    adapters: list[tuple[str, TypeAdapter[Any]]] = [("recipe", adapter(Recipe))]
    adapters += [(_definition(name, cls), adapter(cls)) for name, cls in components]
    try:
        found, shared = TypeAdapter.json_schemas([(key, "validation", a) for key, a in adapters])
    except ValueError as error:  # pydantic's own are ValueErrors
        raise PluginError(f"the fields of a component have no JSON Schema: {error}") from error
    schemas = {key: schema for (key, _), schema in found.items()}
    definitions = {name: _relaxed(schema) for name, schema in shared.get("$defs", {}).items()}
    tables = {key: _schema_of(schema, definitions) for key, schema in schemas.items()}
    root = tables.pop("recipe")
    for name, cls in components:
        definitions[_definition(name, cls)] = _component(name, cls, tables[_definition(name, cls)], registry)
    for kind in KINDS:
        definitions[f"slot.{kind}"], definitions[f"whole.{kind}"] = _slot_schema(kind, registry)
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


def _definition(name: str, cls: type) -> str:
    return f"{component_info(cls).kind}.{name.replace('/', '.')}"  # a / would need escaping in a reference


def _schema_of(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the object schema of a class, following the reference that pydantic may return."""
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    return dict(definitions[name]) if name else _relaxed(schema)


def _relaxed(schema: Any) -> Any:
    """Return a schema without `required` (a base may set it) and null (TOML has none); slots refer to their
    kind."""
    if isinstance(schema, list):
        return [_relaxed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if SLOT in schema:
        doc = {"description": schema["description"]} if "description" in schema else {}
        return {"$ref": f"#/$defs/slot.{schema[SLOT]}", **doc}
    left_out = ("required", "title", "properties")
    relaxed = {key: _relaxed(item) for key, item in schema.items() if key not in left_out}
    if relaxed.get("default", 0) is None:
        del relaxed["default"]
    if "properties" in schema:  # a field may have any of these names
        relaxed["properties"] = {key: _relaxed(item) for key, item in schema["properties"].items()}
    arms = [arm for arm in relaxed.get("anyOf", []) if arm != {"type": "null"}]
    if len(arms) == 1:
        del relaxed["anyOf"]
        return {**arms[0], **relaxed}
    return {**relaxed, "anyOf": arms} if arms else relaxed


def _component(
    name: str, cls: type[ConfigDefaults], table: dict[str, Any], registry: Registry
) -> dict[str, Any]:
    """Return the schema of a component's table."""
    added: dict[str, Any] = {"type": {"description": summary(cls), "enum": _names(name, cls, registry)}}
    if flavors := cls.flavors:
        added["flavor"] = {
            "description": "A named set of values; keys next to it override them.",
            "enum": list(flavors),
        }
    return {**table, "title": name, "properties": {**added, **table.get("properties", {})}}


def _names(name: str, cls: type, registry: Registry) -> list[str]:
    """Return a component's names in a recipe: the full one, and the bare one if no other component has it."""
    bare = name.rpartition("/")[2]
    offered = [n for n in registry.names(component_info(cls).kind) if n.rpartition("/")[2] == bare]
    return [bare, name] if len(offered) == 1 else [name]


def _slot_schema(kind: str, registry: Registry) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of a slot of a kind, and the stricter one for a recipe without a base.

    Each component's table is selected by its `type`, so that an editor marks the wrong key: with alternatives
    (`anyOf`) it could only report that none of them fits.
    """
    names: list[str] = []
    ready: list[str] = []
    tables, wholes, untyped = [], [], {"required": ["type"]}
    for name, cls in registry.components(kind):
        called = _names(name, cls, registry)
        required = required_fields(cls)
        names += called
        ready += [] if required else called
        named = {"required": ["type"], "properties": {"type": {"enum": called}}}
        tables.append({"if": named, "then": {"$ref": f"#/$defs/{_definition(name, cls)}"}})
        whole: dict[str, Any] = {}
        if required and cls.flavors:
            whole = {"anyOf": [{"required": ["flavor"]}, {"required": required}]}
        elif required:
            whole = {"required": required}
        if whole:
            wholes.append({"if": named, "then": whole})
        if KINDS[kind].full_default in called:
            untyped = whole
    typed = {"properties": {"type": {"enum": names}}}
    # The type may stand in a base: then the keys of any component may.
    any_table = {"anyOf": [table["then"] for table in tables]} if tables else {}
    tables.append({"if": {"not": {"required": ["type"]}}, "then": any_table})
    wholes.append({"if": {"not": {"required": ["type"]}}, "then": untyped})
    described = {"description": KINDS[kind].summary, "type": ["string", "object"], "if": {"type": "string"}}
    return (
        {**described, "then": {"enum": names}, "else": {"allOf": [typed, *tables]}},
        {"if": {"type": "string"}, "then": {"enum": ready}, "else": {"allOf": wholes}},
    )


def _section(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a top-level key; an array never merges with a base's, so its components are
    complete."""
    reference = schema.get("items", {}).get("$ref", "")
    if not reference.startswith("#/$defs/slot."):
        return schema
    whole = {"$ref": reference.replace("/slot.", "/whole.")}
    return {**schema, "items": {"allOf": [schema["items"], whole]}}


def _whole_recipe(registry: Registry) -> dict[str, Any]:
    slots = {name: field.type.slot.kind for name, field in fields_of(Recipe).items() if field.type.slot}
    properties: dict[str, Any] = {name: {"$ref": f"#/$defs/whole.{kind}"} for name, kind in slots.items()}
    required = [name for name in required_fields(Recipe) if not default_type(name) and name != "model"]
    model = {"required": ["model"], "properties": {"model": properties.pop("model")}}
    for name in required:
        for section in fields_of(Recipe)[name].type.tables:
            properties[name] = _fields_needed(section)
    needed = [
        {"if": {"required": ["weights"]}, "else": model},  # a folder of weights says which model it is
        _needed("tokenizer", registry, "dataset", needs_tokenizer),
        _needed("dataset", registry, "loop", needs_dataset),
    ]
    return {"required": required, "properties": properties, "allOf": needed}


def _fields_needed(section: type) -> dict[str, Any]:
    marks = {name: field.type.marked_required for name, field in fields_of(section).items()}
    either = {name: mark.unless for name, mark in marks.items() if mark and mark.unless}
    needed: dict[str, Any] = {"required": [name for name in required_fields(section) if name not in either]}
    if either:
        needed["allOf"] = [{"oneOf": [{"required": [one]} for one in pair]} for pair in either.items()]
    return needed


def _needed(name: str, registry: Registry, kind: str, needs: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the schema that requires a section, except with components of a kind that declare not to need
    it."""
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


def _plugins(registry: Registry) -> list[str]:
    return [f"{p.name} {p.version}" if p.version else p.name for p in registry.plugins if p.state == "ok"]


# ------------------------------------------------------------------------------------------------------- keys


def override_keys(data: Mapping[str, Any], registry: Registry) -> dict[str, list[str]]:
    """Return dotted keys with their possible values, where these can be listed.

    Args:
        data: a resolved recipe, to include the keys of its components; or nothing.
    """
    return dict(_fields(Recipe, data, registry, ""))


def _fields(
    cls: type, data: Mapping[str, Any], registry: Registry, above: str
) -> Iterator[tuple[str, list[str]]]:
    for name, field in fields_of(cls).items():
        yield from _value(field.type, data.get(name), registry, f"{above}{name}")


def _value(type_: Type, data: Any, registry: Registry, key: str) -> Iterator[tuple[str, list[str]]]:
    if type_.slot is not None:
        yield from _slot(type_.slot.kind, data, registry, key)
        return
    if type_.tables:
        yield from _fields(type_.tables[0], data if isinstance(data, dict) else {}, registry, f"{key}.")
        return
    if isinstance(data, list) and (inner := type_.element(0)):
        for i, element in enumerate(data):
            yield from _value(inner, element, registry, f"{key}.{i}")
    if isinstance(data, dict) and (inner := type_.element("")):
        for name, element in data.items():
            yield from _value(inner, element, registry, f"{key}.{name}")
    switches = ["true", "false"] if bool in type_.alternatives else []
    yield key, [*switches, *map(str, type_.choices)]


def _slot(kind: str, data: Any, registry: Registry, key: str) -> Iterator[tuple[str, list[str]]]:
    names = registry.names(kind)
    yield key, _shortest(names)
    name = data.get("type") if isinstance(data, dict) else KINDS[kind].full_default
    try:
        cls = registry.find(kind, name) if isinstance(name, str) else None
    except PluginError:
        return  # the recipe itself will say so
    if cls is None:
        return
    if flavors := cls.flavors:
        yield f"{key}.flavor", list(flavors)
    yield from _fields(cls, data if isinstance(data, dict) else {}, registry, f"{key}.")


def _shortest(names: list[str]) -> list[str]:
    """Return bare names where they are unique, else full ones."""
    bare_names = [name.rpartition("/")[2] for name in names]
    return [b if bare_names.count(b) == 1 else name for name, b in zip(names, bare_names, strict=True)]


# --------------------------------------------------------------------------------------------------- template


WIDTH = 100
OWN = ("recipe", "name", "description", "requires")
"""Keys that describe one recipe itself; the template sets them, or leaves them to the base."""


def template(
    loaded: Loaded, extends: str, name: str, schema: str | None = None, *, full: bool = False
) -> str:
    """Return the text of a recipe `name` that extends `loaded`, by the reference `extends`.

    Uncommenting a key changes nothing until its value is edited. `schema`: a JSON Schema file to name for
    editors. `full`: list every key, not only those that `loaded` sets.
    """
    body = _Body(loaded, full).lines()
    return "\n".join([*_head(extends, name, schema), *body, ""])


def _head(extends: str, name: str, schema: str | None) -> Iterator[str]:
    if schema is not None:
        yield f"#:schema {schema}"
    yield "recipe = 1"
    yield f"extends = {inline(extends)}"
    yield f"name = {inline(name)}"
    yield f"# description = {inline('')}"


class _Body:
    """The keys of a recipe as comments, table by table."""

    def __init__(self, loaded: Loaded, full: bool) -> None:
        self._loaded = loaded
        self._full = full
        written = [key for key, origin in loaded.origins.items() if origin.kind == "file"]
        self._written = {".".join(parts[:n]) for parts in (k.split(".") for k in written) for n in range(9)}

    def lines(self) -> Iterator[str]:
        tables = []
        for name, field in fields_of(Recipe).items():
            value = getattr(self._loaded.recipe, name)
            if name in OWN:
                continue
            if dataclasses.is_dataclass(value) or isinstance(value, list):
                tables.append((name, value))
            else:
                yield from self._key(field, self._loaded.data.get(name), name)
        for name, value in tables:
            data = self._loaded.data[name]
            if isinstance(value, list):
                yield from self._array(name, value, data)
            elif keys := list(self._keys(value, data, name)):
                yield from ("", *_comment(summary(type(value))), f"[{name}]", *keys)

    def _array(self, name: str, values: list[Any], data: list[Any]) -> Iterator[str]:
        if not values and self._full:
            yield from ("", f"## [[{name}]]: none; `titan list-components` lists what is available")
        for number, (value, table) in enumerate(zip(values, data, strict=True)):
            keys = self._keys(value, table, f"{name}.{number}")
            yield from ("", *_comment(summary(type(value))), f"# [[{name}]]", *keys)

    def _keys(self, config: Any, data: dict[str, Any], path: str) -> Iterator[str]:
        for key in ("type", "flavor"):
            if key in data and self._wanted(f"{path}.{key}"):
                yield f"# {key} = {inline(data[key])}"
        cls: type = type(config)
        for name, field in fields_of(cls).items():
            yield from self._key(field, data.get(name), f"{path}.{name}")

    def _key(self, field: Field, value: Any, path: str) -> Iterator[str]:
        if not self._wanted(path):
            return
        yield from _comment(field.doc)
        if value is None:
            yield comment(f"{field.name}: {field.type}; not set", "## ")
        else:
            yield f"# {field.name} = {inline(value)}"

    def _wanted(self, path: str) -> bool:
        return self._full or path in self._written


def _comment(text: str) -> list[str]:
    """Return a line as a comment; a second # tells prose from keys."""
    return [comment(line, "## ") for line in textwrap.wrap(" ".join(text.split()), WIDTH)]
