"""A new recipe that extends another: every key of it as a comment, with its meaning and its value there."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from titancli.registry.describe import field_docs, summary, type_text

if TYPE_CHECKING:
    from titancli.recipe.load import Loaded

WIDTH = 100
OWN = ("recipe", "name", "description", "requires")
"""What a recipe says of itself; the template sets it, or leaves it to the base."""


def template(loaded: Loaded, extends: str, name: str, schema: str | None = None) -> str:
    """The text of a recipe `name` that extends `loaded`, by the reference `extends`.

    Taking the `# ` off a key changes nothing until its value is edited. `schema`: a JSON Schema file to name
    for editors.
    """
    return "\n".join([*_head(extends, name, schema), *_body(loaded), ""])


def _head(extends: str, name: str, schema: str | None) -> Iterator[str]:
    if schema is not None:
        yield f"#:schema {schema}"
    yield "recipe = 1"
    yield f"extends = {_toml(extends)}"
    yield f"name = {_toml(name)}"
    yield f"# description = {_toml('')}"


def _body(loaded: Loaded) -> Iterator[str]:
    recipe = loaded.recipe
    hints, docs = _hints(type(recipe)), field_docs(type(recipe))
    tables = []
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in OWN:
            continue
        if dataclasses.is_dataclass(value) or isinstance(value, list):
            tables.append((field.name, value))
        else:
            yield from _key(field.name, loaded.data.get(field.name), hints[field.name], docs.get(field.name))
    for name, value in tables:
        data = loaded.data[name]
        if isinstance(value, list):
            yield from _array(name, value, data)
        else:
            yield from ("", *_comment(summary(type(value))), f"[{name}]", *_keys(value, data))


def _array(name: str, values: list[Any], data: list[Any]) -> Iterator[str]:
    if not values:
        yield from ("", f"## [[{name}]]: none; `titan list-components` shows what there is")
    for value, table in zip(values, data, strict=True):
        yield from ("", *_comment(summary(type(value))), f"# [[{name}]]", *_keys(value, table))


def _keys(config: Any, data: dict[str, Any]) -> Iterator[str]:
    hints, docs = _hints(type(config)), field_docs(type(config))
    for key in ("type", "flavor"):
        if key in data:
            yield f"# {key} = {_toml(data[key])}"
    for field in dataclasses.fields(config):
        if field.init:
            yield from _key(field.name, data.get(field.name), hints[field.name], docs.get(field.name))


def _key(name: str, value: Any, hint: Any, doc: str | None) -> Iterator[str]:
    yield from _comment(doc or "")
    if value is None:
        yield f"# {name} is not set: {type_text(hint)}"
    else:
        yield f"# {name} = {_toml(value)}"


def _comment(text: str) -> list[str]:
    """Words are told from keys by a second #."""
    return [f"## {line}" for line in textwrap.wrap(" ".join(text.split()), WIDTH)]


def _hints(cls: type) -> dict[str, Any]:
    from titancli.recipe.hints import fields_of

    return fields_of(cls)


def _toml(value: Any) -> str:
    """A value on one line."""
    import tomli_w

    if isinstance(value, dict):
        inner = ", ".join(f"{_bare(key)} = {_toml(below)}" for key, below in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def _bare(key: str) -> str:
    from titancli.recipe.tree import dotted

    return dotted([key])
