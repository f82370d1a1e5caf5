"""Binding of plain data to configs, with pydantic. Imported only when a recipe is bound."""

from __future__ import annotations

import functools
import json
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationInfo
from pydantic.errors import PydanticUserError
from pydantic_core import CoreSchema, SchemaError
from pydantic_core.core_schema import with_info_plain_validator_function

from titancli.errors import PluginError, TitanError


class Components(Protocol):
    """The lookup by which a slot finds its component: a `titancli.registry.lookup.Registry`."""

    def find(self, kind: str, name: str) -> type: ...


def bind(cls: type, data: Any, registry: Components) -> Any:
    """Bind JSON data to a config class, strictly.

    Values are bound as JSON, because from Python pydantic's strict mode accepts no dict for a dataclass and
    no list for a tuple.

    Raises:
        pydantic.ValidationError: everything that does not fit, with paths through all slots.
        PluginError: an annotation of a component's class cannot be bound.
    """
    return adapter(cls).validate_json(json.dumps(data), context=registry)


@functools.cache
def adapter(cls: type) -> TypeAdapter[Any]:
    """Return the pydantic adapter of a config class.

    Raises:
        PluginError: an annotation of the class cannot be bound.
    """
    try:
        return TypeAdapter(cls)
    except (PydanticUserError, SchemaError, NameError, TypeError) as error:
        raise PluginError(
            f"the fields of {cls.__module__}.{cls.__qualname__} cannot be bound: {error}",
            hint="this is a bug in the plugin that provides it",
        ) from error


def slot_schema(kind: str) -> CoreSchema:
    """Return the schema of a slot, which looks the component up in the current registry and binds it.

    The data comes resolved: `type` is a full name, and a flavor's values are filled in. None stands where
    resolving has already reported a mistake.
    """

    def bind_component(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return None
        registry: Any = info.context
        fields = {key: below for key, below in value.items() if key not in ("type", "flavor")}
        cls = registry.find(kind, value["type"])
        try:
            return bind(cls, fields, registry)
        except (ValueError, AssertionError, TitanError):  # pydantic's own is a ValueError
            raise
        except Exception as error:
            name = f"{cls.__module__}.{cls.__qualname__}"
            raise PluginError(f"{name} cannot be created: {type(error).__name__}: {error}") from error

    return with_info_plain_validator_function(bind_component)
