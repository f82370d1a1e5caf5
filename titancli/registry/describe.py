"""A component told in words: its summary and its fields, for `list-components` and `show`. Torch-free."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

from titancli.registry.component import Slot

OPERATORS = {
    "Gt": "gt >",
    "Ge": "ge >=",
    "Lt": "lt <",
    "Le": "le <=",
    "MultipleOf": "multiple_of a multiple of",
}


@dataclasses.dataclass(frozen=True)
class FieldText:
    """One field of a config."""

    name: str
    type: str
    """As a person would write it: `int > 0`, `"linear" | "cosine"`, `list of logger`."""
    required: bool
    default: Any
    """Plain data; None where there is none, or where it is None."""
    doc: str


def summary(config: type) -> str:
    """The first line of a class's docstring; empty where it has none."""
    doc = config.__dict__.get("__doc__") or ""
    if doc.startswith(f"{config.__name__}("):  # what dataclass writes where there is none
        return ""
    return inspect.cleandoc(doc).partition("\n")[0]


def describe(config: type) -> list[FieldText]:
    """The fields of a config class, in order; those of a table inside it follow it, as `table.field`."""
    hints = typing.get_type_hints(config, include_extras=True)
    docs = field_docs(config)
    told = []
    for field in dataclasses.fields(config):
        hint, doc = hints[field.name], docs.get(field.name, "")
        told.append(FieldText(field.name, type_text(hint), _required(field), _default(field), doc))
        for table in _tables(hint):
            told[-1] = dataclasses.replace(told[-1], doc=told[-1].doc or summary(table))
            told += [dataclasses.replace(f, name=f"{field.name}.{f.name}") for f in describe(table)]
    return told


def field_docs(config: type) -> dict[str, str]:
    """The docstrings that stand below the fields; none where the source cannot be read."""
    docs: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):  # made in a shell, or installed without its source
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = ast.literal_eval(below.value) if _is_text(below) else None  # type: ignore[attr-defined]
                if text:
                    docs[field.target.id] = inspect.cleandoc(text)
    return docs


def type_text(hint: Any) -> str:
    """An annotation in words. That a field may be None is left to its default."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _annotated(arguments)
    if origin is typing.Literal:
        return " | ".join(_quoted(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_text(arg) for arg in arguments if arg is not type(None))
    if origin in (list, tuple, set, frozenset):
        return f"list of {type_text(arguments[0])}" if arguments else "list"
    if origin is dict:
        return f"table of {type_text(arguments[1])}"
    if dataclasses.is_dataclass(hint):
        return "table"
    if isinstance(hint, type) and issubclass(hint, Path):
        return "path"
    return hint.__name__ if isinstance(hint, type) else str(hint).removeprefix("typing.")


def _tables(hint: Any) -> list[type]:
    """The dataclasses that stand in an annotation, not in a list or dict of it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Annotated):
        return [table for arg in typing.get_args(hint) for table in _tables(arg)]
    return [hint] if isinstance(hint, type) and dataclasses.is_dataclass(hint) else []


def _annotated(arguments: tuple[Any, ...]) -> str:
    slots = [mark for mark in arguments[1:] if isinstance(mark, Slot)]
    if slots:
        return slots[0].kind
    limits = []
    for mark in arguments[1:]:
        attribute, _, words = OPERATORS.get(type(mark).__name__, "").partition(" ")
        if attribute:
            limits.append(f"{words} {getattr(mark, attribute)}")
    return " ".join([type_text(arguments[0]), ", ".join(limits)]).strip()


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return plain(field.default_factory())
    return None if field.default is dataclasses.MISSING else plain(field.default)


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
