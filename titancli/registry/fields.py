"""The fields of a config class: type, default, doc, choices, nested components. Torch-free.

Binding, overrides, `titan show`, the template and the JSON Schema are all made from these.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

Component = Any
"""The type of a slot: `Annotated[Component, Slot("optimizer")]`. Its value is a bound config."""

SLOT = "x-titan-slot"
OPERATORS = {
    "Gt": "gt >",
    "Ge": "ge >=",
    "Lt": "lt <",
    "Le": "le <=",
    "MultipleOf": "multiple_of a multiple of",
}


@dataclasses.dataclass(frozen=True)
class Slot:
    """Marks a field that holds another component of this kind, bound recursively."""

    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from titancli.registry.binding import slot_schema

        return slot_schema(self.kind)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {SLOT: self.kind}  # `titan recipe schema` puts the components of this kind here


@dataclasses.dataclass(frozen=True)
class LocalPath:
    """Mark a string that is a path on this machine if it is absolute, and a name (on the Hub) otherwise:
    `Annotated[str, LocalPath()]`. A run needs the path to exist, as for a field of type `Path`."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """Says what a field changes, `Annotated[int, Effect("running")]`; without it, what its section does (its
    `effect`, a class variable) or else the section around it.

    - `"numbers"`: what a run computes.
    - `"speed"`: how fast, and the order of additions, and so the last bits.
    - `"running"`: what a run needs around its steps, such as versions, checkpoints and timeouts.
    - `"watching"`: what is shown and recorded of it.
    """

    name: Literal["numbers", "speed", "running", "watching"]


@dataclasses.dataclass(frozen=True)
class Required:
    """Mark a field that a recipe must set although its class has a default, for scripts that need not."""

    unless: str | None = None
    """Field of the same class that may be set in its place; a recipe sets one of the two."""


@dataclasses.dataclass(frozen=True)
class Type:
    """The values that a type annotation admits. As text: `int > 0`, `"linear" | "cosine"`, `list of path`."""

    hint: Any

    def __str__(self) -> str:
        return " | ".join(_words(arm, marks) for arm, marks in _arms(self.hint) if arm is not type(None))

    @property
    def alternatives(self) -> list[Any]:
        """Return the members of a union, or the one type, without None and `Annotated[...]`."""
        return [arm for arm, _ in _arms(self.hint) if arm is not type(None)]

    @property
    def nullable(self) -> bool:
        """Return whether None is admitted."""
        return any(arm is type(None) for arm, _ in _arms(self.hint))

    @property
    def slot(self) -> Slot | None:
        """Return the slot, if the type is one."""
        return next((mark for _, marks in _arms(self.hint) for mark in marks if isinstance(mark, Slot)), None)

    @property
    def local_path(self) -> bool:
        """Return whether the type is marked as `LocalPath`."""
        return any(isinstance(mark, LocalPath) for _, marks in _arms(self.hint) for mark in marks)

    @property
    def marked_required(self) -> Required | None:
        """Return the mark `Required`, if the type has it."""
        return next(
            (mark for _, marks in _arms(self.hint) for mark in marks if isinstance(mark, Required)), None
        )

    @property
    def choices(self) -> list[Any]:
        """Return the values of `Literal[...]` and of enums."""
        found: list[Any] = []
        for arm in self.alternatives:
            if typing.get_origin(arm) is typing.Literal:
                found += typing.get_args(arm)
            elif isinstance(arm, type) and issubclass(arm, enum.Enum):
                found += [member.value for member in arm]
        return found

    @property
    def tables(self) -> list[type]:
        """Return the config classes, except those in a list or dict."""
        return [arm for arm in self.alternatives if isinstance(arm, type) and dataclasses.is_dataclass(arm)]

    @property
    def effect(self) -> str | None:
        """Return the effect that the type is marked with, or that its section declares; None: neither."""
        marks = (mark.name for _, marks in _arms(self.hint) for mark in marks if isinstance(mark, Effect))
        return next(marks, None) or next((getattr(table, "effect", None) for table in self.tables), None)

    def element(self, key: str | int) -> Type | None:
        """Return the type of one element of a list, tuple or dict; None for anything else."""
        found = (_element(arm, key) for arm in self.alternatives)
        return next((Type(hint) for hint in found if hint is not None), None)


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a config class."""

    name: str
    config: type
    type: Type
    declared: dataclasses.Field[Any]

    @property
    def required(self) -> bool:
        has_none = dataclasses.MISSING is self.declared.default is self.declared.default_factory
        return has_none or self.type.marked_required is not None

    @property
    def default(self) -> Any:
        """Return the default as plain data; None if there is no default, or it is None."""
        if self.declared.default_factory is not dataclasses.MISSING:
            return plain(self.declared.default_factory())
        return None if self.required else plain(self.declared.default)

    @property
    def doc(self) -> str:
        """Return the docstring below the field, or the summary of the table's class; empty if there is
        none."""
        own = _docs(self.config).get(self.declared.name)
        return own or next(filter(None, map(summary, self.type.tables)), "")


@functools.cache
def fields_of(config: type) -> dict[str, Field]:
    """Return the fields of a config class that a recipe can set, by name, in order."""
    hints = typing.get_type_hints(config, include_extras=True)
    settable = (field for field in dataclasses.fields(config) if field.init)
    return {field.name: Field(field.name, config, Type(hints[field.name]), field) for field in settable}


def nested_fields(config: type) -> list[Field]:
    """Return `fields_of` as a list in which a table is followed by its own fields, as `table.field`."""
    found = []
    for field in fields_of(config).values():
        found.append(field)
        for table in field.type.tables:
            inner = nested_fields(table)
            found += [dataclasses.replace(below, name=f"{field.name}.{below.name}") for below in inner]
    return found


def required_fields(config: type) -> list[str]:
    """Return the names of the fields that a recipe must set."""
    return [field.name for field in fields_of(config).values() if field.required]


def summary(config: type) -> str:
    """Return the first line of a class's docstring; empty if it has none."""
    doc = config.__dict__.get("__doc__") or ""
    if doc.startswith(f"{config.__name__}("):  # dataclass writes this in place of a missing one
        return ""
    return inspect.cleandoc(doc).partition("\n")[0]


def plain(value: Any) -> Any:
    """Return a value as plain JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


@functools.cache
def _docs(config: type) -> dict[str, str]:
    """Return the docstrings below the fields; none if the source cannot be read."""
    docs: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):  # made in a shell, or installed without its source
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = below.value.value if _is_constant(below) else None  # type: ignore[attr-defined]
                if isinstance(text, str) and text:
                    docs[field.target.id] = inspect.cleandoc(text)
    return docs


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _arms(hint: Any, marks: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Return the alternatives of a hint, each with its annotations."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        yield from _arms(arguments[0], (*marks, *arguments[1:]))
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _arms(argument, marks)
    else:
        yield hint, marks


def _element(hint: Any, key: str | int) -> Any | None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if not isinstance(origin, type) or not arguments:
        return None
    if origin is tuple and isinstance(key, int) and arguments[-1] is not Ellipsis:
        return arguments[key] if key < len(arguments) else None
    if issubclass(origin, dict):
        return arguments[-1] if isinstance(key, str) else None
    return arguments[0] if isinstance(key, int) else None


def _words(hint: Any, marks: tuple[Any, ...]) -> str:
    """Describe one alternative in words."""
    limits = []
    for mark in marks:
        if isinstance(mark, Slot):
            return mark.kind
        attribute, _, words = OPERATORS.get(type(mark).__name__, "").partition(" ")
        if attribute:
            limits.append(f"{words} {getattr(mark, attribute)}")
    return " ".join([_name(hint), ", ".join(limits)]).strip()


def _name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in arguments)
    if origin in (list, tuple, set, frozenset):
        return f"list of {Type(arguments[0])}" if arguments else "list"
    if origin is dict:
        return f"table of {Type(arguments[1])}"
    if dataclasses.is_dataclass(hint):
        return "table"
    if isinstance(hint, type) and issubclass(hint, Path):
        return "path"
    return hint.__name__ if isinstance(hint, type) else str(hint).removeprefix("typing.")
