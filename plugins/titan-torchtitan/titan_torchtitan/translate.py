"""Translate a torchtitan job config (0.2.2 and earlier) to a recipe. Nothing is dropped silently.

`fields.py` defines the translation of each field, `older.py` the fields before 0.2.2, `parts.py` that of
fields which belong together. `translate` goes through all of them and reports everything that it could not
carry over.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_torchtitan.fields import FIELDS, Field
from titan_torchtitan.job import Entry, Job, Remark, has_key
from titan_torchtitan.older import GONE
from titan_torchtitan.parts import PARTS
from titancli import Recipe
from titancli.commands import comment, printable
from titancli.errors import RecipeError
from titancli.recipe import Problems, read_file, toml_blocks

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry


@dataclass(frozen=True)
class Translation:
    """A recipe's text, and the results for the job config's fields."""

    text: str
    """The recipe as TOML; fields that were not carried over are listed at its end as comments."""
    moved: list[str]
    """Fields of the job that the recipe carries over, by their names in the job."""
    lost: list[Remark]
    """Fields that are not carried over, with reasons; those without a line are torchtitan's defaults."""
    changed: list[Remark]
    """Fields that are expressed differently."""
    idle: list[Remark]
    """Fields without a counterpart whose values match what titan does anyway."""

    def lines(self, path: str) -> list[str]:
        """Return the report for users; `path` names the job config."""
        return list(_account(self, path))


def translate(path: Path, name: str, registry: Registry) -> Translation:
    """Return the recipe closest to a job config.

    Raises:
        RecipeError: the file cannot be read, is not TOML, or is not a job config.
    """
    problems = Problems()
    root = read_file(path, problems)
    problems.raise_any()
    if root is None or not any(key.split(".")[0] in root.value for key in FIELDS):
        hint = "a job config has sections such as [job], [model] and [training]"
        raise RecipeError(f"{path} is not a torchtitan job config: it has none of the sections", hint=hint)
    if "recipe" in root.value or "extends" in root.value:
        raise RecipeError(f"{path} is already a recipe", hint=f"titan validate {path}")
    job = Job(root)
    for read_part in PARTS:
        read_part(job, registry)
    for field in (*FIELDS.values(), *GONE.values()):
        _field(job, field)
    lost = sorted(job.lost, key=lambda remark: (remark.line is None, remark.line or 0))
    data = _ordered({"recipe": 1, "name": name, **job.recipe})
    found = Translation("", sorted(job.moved), lost, job.changed, job.idle)
    return dataclasses.replace(found, text=_text(data, path, found))


def _field(job: Job, field: Field) -> None:
    """Translate a field that is independent of others."""
    entry = job.entries.get(field.name)
    if field.to is not None:
        _carry(job, field, entry)
    elif field.why:
        value = job.value(field.name)
        saves_nothing = field.name.startswith("checkpoint.") and not job.value("checkpoint.enable")
        if value != field.titan and not (entry is None and saves_nothing):
            job.lose(field.name, field.why)
        elif entry is not None:
            job.ignore(field.name)


def _carry(job: Job, field: Field, entry: Entry | None) -> None:
    key = str(field.to)
    if entry is None:
        if field.always:
            job.put(key, field.default)
    elif entry.value == field.default and not has_key(key):
        job.ignore(field.name)
    elif not has_key(key):
        job.lose(field.name, field.why or f"this version of titan has no {key}")
    elif _overruled(job, key):
        job.take(field.name)
    else:
        job.put(key, entry.value, field.name)


def _overruled(job: Job, key: str) -> bool:
    """Return whether a part has already set the key, with more information than this field alone."""
    section, _, name = key.partition(".")
    return name in job.recipe.get(section, {}) if name else key in job.recipe


def _ordered(data: dict[str, Any]) -> dict[str, Any]:
    """Return the sections in the order of recipes."""
    order = list(Recipe.__dataclass_fields__)
    return {key: data[key] for key in sorted(data, key=order.index)}


def _text(data: dict[str, Any], path: Path, found: Translation) -> str:
    from titancli import __version__

    head = comment(f"Translated from the torchtitan job config {path.name} by titan {__version__}.")
    account = "".join(f"{comment(line)}\n" for line in _account(found, path.name))
    return "\n".join([f"{head}\n{toml_blocks(data)}", *filter(None, [account])])


def _account(found: Translation, path: str) -> Iterable[str]:
    for remark in found.lost:
        if remark.line is not None:
            yield f"{path}:{remark.line}: not carried over: {_shown(remark)}: {remark.text}"
    for remark in found.changed:
        place = f"{path}:{remark.line}" if remark.line is not None else f"{path}"
        yield f"{place}: changed: {_shown(remark)}: {remark.text}"
    for remark in found.lost:
        if remark.line is None:
            yield f"{path}: not carried over, torchtitan's default: {_shown(remark)}: {remark.text}"
    if found.idle:
        fields = ", ".join(f"{_shown(remark)} (line {remark.line})" for remark in found.idle)
        yield f"{path}: not needed, because titan always does this: {fields}"


def _shown(remark: Remark) -> str:
    value = remark.value
    text = value if isinstance(value, str) and not value.isprintable() else json.dumps(value, default=str)
    text = printable(text)
    return f"{remark.name} = {text if len(text) <= 60 else text[:59] + '…'}"
