"""A component's fields, told in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from annotated_types import Ge, Gt, Lt

from titancli import Component, Slot, component
from titancli.registry.component import section
from titancli.registry.fields import Type, nested_fields, summary


@section
class Inner:
    """A table inside."""

    width: int = 3
    """How wide."""


@component("loss", "described", target="nowhere:build")
class Described:
    """The first line.

    More lines.
    """

    size: Annotated[int, Gt(0)]
    """How large,
    over two lines."""
    mode: Literal["a", "b"] = "a"
    inner: Inner | None = None
    names: list[str]
    "In other quotes."
    flavors: ClassVar[dict[str, dict]] = {}
    """Not a field."""

    def check(self, recipe: object) -> list:
        """Not a field."""
        return []


def test_the_summary_is_the_first_line() -> None:
    assert summary(Described) == "The first line."


def test_a_class_without_a_docstring_has_no_summary() -> None:
    @component("loss", "bare", target="nowhere:build")
    class Bare:
        x: int = 1

    assert summary(Bare) == ""


def test_fields_have_type_default_and_doc() -> None:
    told = {field.name: field for field in nested_fields(Described)}
    assert list(told) == ["size", "mode", "inner", "inner.width", "names"]
    assert told["size"].required and told["size"].doc == "How large,\nover two lines."
    assert told["mode"].default == "a" and told["mode"].doc == ""
    assert told["inner"].doc == "A table inside."
    assert (told["inner.width"].default, told["inner.width"].doc) == (3, "How wide.")
    assert told["names"].doc == "In other quotes."


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "int"),
        (str | None, "str"),
        (Path, "path"),
        (Annotated[float, Ge(0), Lt(1)] | None, "float >= 0, < 1"),
        (Literal["x", 2], '"x" | 2'),
        (int | Literal["auto"], 'int | "auto"'),
        (list[Path], "list of path"),
        (dict[str, int], "table of int"),
        (Annotated[Component, Slot("optimizer")] | None, "optimizer"),
        (list[Annotated[Component, Slot("logger")]], "list of logger"),
        (Inner, "table"),
        (tuple[int, int], "list of int"),
    ],
)
def test_types_are_told_in_words(hint: object, words: str) -> None:
    assert str(Type(hint)) == words
