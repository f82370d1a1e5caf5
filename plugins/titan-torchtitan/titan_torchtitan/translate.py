"""From a torchtitan job config (0.2.2 and before) to a recipe. Nothing is dropped in silence.

`fields.py` says what becomes of each field, `older.py` what fields were called before 0.2.2, `parts.py` what
several fields mean together. `translate` goes through all of them and keeps an account of what it could not
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
from titancli.commands import printable
from titancli.errors import RecipeError
from titancli.recipe import Problems, read_file

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry


@dataclass(frozen=True)
class Translation:
    """A recipe's text, and what became of the job config's fields."""

    text: str
    """The recipe as TOML; what was not carried over stands at its end as comments."""
    moved: list[str]
    """Fields of the job that the recipe has taken over, by the names that the job writes."""
    lost: list[Remark]
    """Not carried over, each with its reason; those without a line are torchtitan's defaults."""
    changed: list[Remark]
    """Said in another way."""
    idle: list[Remark]
    """Without a counterpart, and asking for what titan does anyway."""

    def lines(self, path: str) -> list[str]:
        """The account, for people; `path` is how they know the job config."""
        return list(_account(self, path))


def translate(path: Path, name: str, registry: Registry) -> Translation:
    """The recipe that comes nearest to a job config.

    Raises:
        RecipeError: the file cannot be read, is not TOML, or is no job config at all.
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
    """What becomes of a field that stands for itself."""
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
    """Whether a part has set the key already, knowing more than the field alone says."""
    section, _, name = key.partition(".")
    return name in job.recipe.get(section, {}) if name else key in job.recipe


def _ordered(data: dict[str, Any]) -> dict[str, Any]:
    """Sections in the order that recipes have."""
    order = list(Recipe.__dataclass_fields__)
    return {key: data[key] for key in sorted(data, key=order.index)}


def _text(data: dict[str, Any], path: Path, found: Translation) -> str:
    import tomli_w

    from titancli import __version__

    head = f"# Translated from the torchtitan job config {path.name} by titan {__version__}."
    tables = {
        key: value for key, value in data.items() if isinstance(value, list)
    }  # [[loggers]], [[converters]]
    blocks = [tomli_w.dumps({key: value for key, value in data.items() if key not in tables})]
    blocks += [f"[[{key}]]\n{tomli_w.dumps(table)}" for key, rows in tables.items() for table in rows]
    account = "".join(f"# {line}\n" for line in _account(found, path.name))
    return "\n".join([f"{head}\n{blocks[0]}", *blocks[1:], *filter(None, [account])])


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
