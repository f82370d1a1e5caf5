"""What a value should have been, in words."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from titancli.recipe.problems import nearest
from titancli.recipe.read import quoting, taken_as_text
from titancli.recipe.scan import KeyPath
from titancli.recipe.tree import Node, dotted

TYPES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path, as text",
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
    "string_too_short": ("min_length", "text of at least {} characters"),
    "string_too_long": ("max_length", "text of at most {} characters"),
    "string_pattern_mismatch": ("pattern", "text that matches {}"),
}
SWITCHES = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
"""What people write for a boolean."""


@dataclass(frozen=True)
class Mistake:
    """One of pydantic's errors about one value."""

    code: str
    expected: str
    """What the value must be: `an integer`. Empty where `message` says it all."""
    choices: tuple[Any, ...] = ()
    message: str = ""

    @classmethod
    def of(cls, error: Any, *, in_table: bool) -> Mistake:
        """`in_table`: the error lies in one alternative's own fields, below what the recipe's data names."""
        kind, context = error["type"], error.get("ctx", {})
        name = re.sub(r"_(type|parsing|from_float)\Z", "", kind)
        if kind in ("literal_error", "enum"):
            return cls("bad-choice", f"one of {context['expected']}", _choices(context["expected"]))
        if kind in LIMITS:
            key, words = LIMITS[kind]
            limit = context[key]
            return cls("out-of-range", words.format(f"{limit:g}" if isinstance(limit, float) else limit))
        if name in TYPES and not in_table:
            return cls("wrong-type", TYPES[name])
        if kind == "none_required":
            return cls("wrong-type", "left out")
        return cls("bad-value", "", message=error["msg"].removeprefix("Value error, "))


def describe(path: KeyPath, node: Node, mistakes: list[Mistake]) -> tuple[str, str, str | None]:
    """The code, message and hint for all that is wrong with one value."""
    expected = list(dict.fromkeys(mistake.expected for mistake in mistakes if mistake.expected))
    codes = {mistake.code for mistake in mistakes}
    choices = [choice for mistake in mistakes for choice in mistake.choices]
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
    """A value as its writer knows it, cut short."""
    if isinstance(node.value, dict):
        return "a table"
    text = node.origin.text
    if isinstance(node.value, list):
        return f"the array {text}" if text and len(text) <= 40 and "\n" not in text else "an array"
    if isinstance(node.value, str):
        short = node.value if len(node.value) <= 40 else node.value[:39] + "…"
        return f"the text {json.dumps(short, ensure_ascii=False)}"
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
            return f"write {SWITCHES[value.lower()]}"
        wants_number = "an integer" in expected or "a number" in expected
        if wants_number and re.fullmatch(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", value):
            return f"write {value} without quotes"
        if "an array" in expected:
            return f'write ["{value}"]' if not override else f"""write '{dotted(path)}=["{value}"]'"""
        return None
    if "text" in expected or any(isinstance(choice, str) for choice in choices):
        if not isinstance(value, (dict, list)):
            return f"for text, put quotes around it: {quoting(node)}"
        return None
    if isinstance(value, float) and "an integer" in expected and value.is_integer():
        return f"write {int(value)}"
    if "an array" in expected and isinstance(value, dict):
        if override:
            return "there is no array to change an element of; write the whole array"
        return f"an array of tables begins with [[{dotted(path)}]]"
    if "an array" in expected:
        return f"write [{node.origin.text or value}]"
    return None


def _choices(expected: str) -> tuple[Any, ...]:
    """The values in pydantic's `'a', 'b' or 'c'`."""
    texts = [found.replace("\\'", "'") for found in re.findall(r"'((?:[^'\\]|\\.)*)'", expected)]
    numbers = re.findall(r"(?<![\w'])-?\d+(?![\w'])", re.sub(r"'(?:[^'\\]|\\.)*'", "", expected))
    return (*texts, *map(int, numbers))
