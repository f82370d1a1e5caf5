"""What became of each key of another tool's config, and the recipe with that account at its end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from titancli import Recipe
from titancli.commands import comment, printable
from titancli.recipe import toml_blocks


@dataclass(frozen=True)
class Remark:
    """A remark about one key."""

    name: str
    line: int | None
    """None for a key that is not in the config: the remark is about its default."""
    value: Any
    text: str


@dataclass(frozen=True)
class Translation:
    """A recipe's text, and what became of the config's keys."""

    text: str
    """The recipe as TOML; keys that were not carried over are listed at its end as comments."""
    moved: list[str]
    """Keys that the recipe carries over."""
    lost: list[Remark]
    """Keys that are not carried over, with reasons; those without a line are the tool's defaults."""
    changed: list[Remark]
    """Keys that the recipe expresses differently."""
    idle: list[Remark]
    """Keys that say what titan does anyway, or what changes nothing in what is trained."""
    unset: list[Remark]
    """Keys that are null: nothing is set."""

    def lines(self, path: str) -> list[str]:
        """Return the report for users; `path` names the config."""
        return list(_account(self, path))


def as_text(head: str, recipe: dict[str, Any], found: Translation, path: str) -> str:
    """Return the recipe as TOML, with the account as comments.

    Args:
        head: the comment at the top.
        recipe: sections by name, in any order.
        path: the name of the config in the account.
    """
    order = list(Recipe.__dataclass_fields__)
    data = {key: recipe[key] for key in sorted(recipe, key=order.index)}
    account = "".join(f"{comment(line)}\n" for line in _account(found, path))
    return "\n".join([f"{comment(head)}\n{toml_blocks(data)}", *filter(None, [account])])


def _account(found: Translation, path: str) -> Iterable[str]:
    for remark in found.lost:
        if remark.line is not None:
            yield f"{path}:{remark.line}: not carried over: {_shown(remark)}: {remark.text}"
    for remark in found.changed:
        place = path if remark.line is None else f"{path}:{remark.line}"
        yield f"{place}: changed: {_shown(remark)}: {remark.text}"
    for remark in found.lost:
        if remark.line is None:
            yield f"{path}: not carried over, a default: {_shown(remark)}: {remark.text}"
    for rows, what in ((found.idle, "not needed"), (found.unset, "null, so nothing is set")):
        if rows:
            yield f"{path}: {what}: {', '.join(f'{_name(row)} (line {row.line})' for row in rows)}"


def _name(remark: Remark) -> str:
    return str(printable(remark.name))


def _shown(remark: Remark) -> str:
    value = remark.value
    text = value if isinstance(value, str) and not value.isprintable() else json.dumps(value, default=str)
    text = printable(text)
    return f"{_name(remark)} = {text if len(text) <= 60 else text[:59] + '…'}"
