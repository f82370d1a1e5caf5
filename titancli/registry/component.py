"""`@component`: a frozen, torch-free config that names the code that builds it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import keyword
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, dataclass_transform

from titancli.errors import PluginError
from titancli.registry.defaults import CONFIGS, ConfigDefaults, fill_in, fill_in_class, is_filled_in
from titancli.registry.fields import fields_of
from titancli.registry.kinds import KINDS

T = TypeVar("T")

NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
RESERVED = frozenset({"type", "flavor"})
PYDANTIC = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@dataclasses.dataclass(frozen=True)
class ComponentInfo:
    """The data that `@component` recorded about a config class."""

    kind: str
    name: str
    target: str
    """`"module:callable"`, called as `build(config, **runtime)`."""
    hf: str | None = None
    """Models only: `"module:callable"`, called with the config; the names and transforms of its Hugging
    Face form (see `titancli.protocols.HFForm`)."""
    device: str | None = None
    """`"cuda"` for a component that cannot run elsewhere."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(cls: type[T]) -> type[T]:
    """Make a class a strictly bound, frozen, keyword-only dataclass (a core section of a recipe)."""
    for name in inspect.get_annotations(cls):
        if name not in vars(cls) and is_filled_in(cls, name):
            setattr(cls, name, dataclasses.field())  # else the default filled in would be the field's
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    _own_fields_first(cls)
    cls.__pydantic_config__ = PYDANTIC  # type: ignore[attr-defined]
    cls.__get_pydantic_json_schema__ = classmethod(_json_schema)  # type: ignore[attr-defined]
    return cls


def _own_fields_first(cls: type) -> None:
    """Order the fields as a class declares them, then those of its base sections."""
    fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
    own = [name for name in inspect.get_annotations(cls) if name in fields]
    ordered = dict.fromkeys([*own, *fields])
    cls.__dataclass_fields__ = {name: fields[name] for name in ordered}  # type: ignore[attr-defined]


def _json_schema(cls: type, core_schema: Any, handler: Any) -> dict[str, Any]:
    """Add the docstrings of fields. pydantic could read them itself, but would do so at every binding of a
    class."""
    schema = handler(core_schema)
    resolved = handler.resolve_ref_schema(schema)
    properties = resolved.get("properties", {})
    for name, field in fields_of(cls).items():
        if field.doc:
            properties[name].setdefault("description", field.doc)
    if properties:  # pydantic has those of base classes first
        resolved["properties"] = {name: properties[name] for name in fields_of(cls)}
    return schema


@dataclass_transform(kw_only_default=True, frozen_default=True)
def component(
    kind: str, name: str, *, target: str, hf: str | None = None, device: str | None = None
) -> Callable[[type[T]], type[T]]:
    """Make a class the config of a component.

    The class becomes a frozen, keyword-only dataclass. Constraints are written in the types (`Annotated[int,
    Gt(0)]`, `Literal[...]`); attribute docstrings are its help. A class may have `flavors: ClassVar[dict[str,
    dict]]`, and a method `check(self, recipe)` that yields `(key, message)` for problems of the recipe as a
    whole (key: dotted and relative to the component, or `""`).

    Raises:
        PluginError: a bad name or target, a reserved or keyword field name, a field that may be None
            without None as its default (TOML has no null), or a field named as an optional
            method is.
    """

    def decorate(cls: type[T]) -> type[T]:
        where = f"component {kind}/{name} ({cls.__module__}.{cls.__qualname__})"
        if kind not in KINDS:
            raise PluginError(f"{where}: unknown kind {kind!r}", hint=f"the kinds are {', '.join(KINDS)}")
        if not NAME.match(name):
            raise PluginError(
                f"{where}: a name consists of lower-case letters, digits and _, and starts with a letter"
            )
        for reference in filter(None, (target, hf)):
            if not re.match(r"[\w.]+:\w+\Z", reference):
                raise PluginError(f"{where}: {reference!r} is not of the form 'module:callable'")
        cls = section(cls)
        _check_fields(cls, where)
        _complete(cls, kind)
        cls.__component__ = ComponentInfo(kind, name, target, hf, device)  # type: ignore[attr-defined]
        return cls

    return decorate


def _check_fields(cls: type, where: str) -> None:
    for name, field in fields_of(cls).items():
        if name in RESERVED:
            raise PluginError(f"{where}: the field name {name!r} is reserved")
        if keyword.iskeyword(name):
            raise PluginError(f"{where}: the field name {name!r} is a Python keyword")
        if field.type.nullable and field.declared.default is not None:
            raise PluginError(f"{where}: {name} may be None, so its default must be None (TOML has no null)")


def _complete(cls: type, kind: str) -> None:
    for defaults in filter(None, (ConfigDefaults, CONFIGS.get(kind))):
        fill_in_class(cls, defaults, fields_of(cls))


def is_config(value: Any) -> bool:
    """Return whether this is a component's config, or its class."""
    return hasattr(value, "__component__")


def component_info(config: Any) -> ComponentInfo:
    """Return the data that `@component` recorded about a config, or about its class."""
    return config.__component__


def configs(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield every section and component of a bound recipe with its path, those in slots included."""
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from configs(item, (*path, i))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from configs(item, (*path, key))
    elif dataclasses.is_dataclass(value):
        yield path, value
        for field in dataclasses.fields(value):
            yield from configs(getattr(value, field.name), (*path, field.name))


def load_target(reference: str) -> Callable[..., Any]:
    """Import `"module:callable"`.

    Raises:
        PluginError: the module cannot be imported, or has no such name. The cause is chained.
    """
    module_name, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        raise PluginError(f"cannot load {reference!r}: {type(error).__name__}: {error}") from error


def build(config: Any, **runtime: Any) -> Any:
    """Import the config's target, call it as `build(config, **runtime)`, and give what it returns the
    optional members of its kind that it lacks.

    Raises:
        PluginError: the target cannot be imported, or what it returned cannot have these members.
    """
    info = component_info(config)
    built = completed(info.kind, load_target(info.target)(config, **runtime))
    kept = BUILT.setdefault((type(built).__module__, type(built).__qualname__), set())
    kept.add((info.kind, info.name))
    return built


def build_offered(config: Any, **offered: Any) -> Any:
    """Build as `build` does, with those of the arguments that the target takes."""
    return build(config, **{name: value for name, value in offered.items() if takes(config, name)})


def takes(config: Any, argument: str) -> bool:
    """Return whether the target of a config takes an argument of this name."""
    return argument in inspect.signature(load_target(component_info(config).target)).parameters


def build_hf(config: Any) -> Any:
    """Build the Hugging Face form of a model's config, with its optional members; None: it has none."""
    target = component_info(config).hf
    return None if target is None else _filled_in(load_target(target)(config), "HFFormDefaults")


def completed(kind: str, built: Any) -> Any:
    """Give an object of a kind the optional members that it lacks, as `build` does, and return it.

    Raises:
        PluginError: it has something else in place of a method, or can be given no attributes.
    """
    optional = KINDS[kind].optional
    return built if optional is None else _filled_in(built, optional)


def _filled_in(built: Any, defaults: str) -> Any:
    return fill_in(
        built, load_target(f"titancli.protocols:{defaults}")
    )  # by name: they stand above the registry


BUILT: dict[tuple[str, str], set[tuple[str, str]]] = {}
"""Kinds and names of the components built as a class, by the class's module and name."""
