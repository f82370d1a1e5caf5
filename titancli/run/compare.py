"""Find the differences between two recipes or runs, including their software. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import RecipeError
from titancli.provenance import file_hash, versions
from titancli.registry import plugin_files
from titancli.run.drift import Change, changes
from titancli.runs import RunFolder, read_lock

if TYPE_CHECKING:
    from titancli.observe.summary import Summary


@dataclass(frozen=True)
class Side:
    """A recipe's data, and the versions of titan, its libraries and its plugins."""

    data: dict[str, Any]
    software: dict[str, str]


def read_side(reference: str, overrides: Sequence[str] = (), *, unset: Sequence[str] = ()) -> Side:
    """Return the side of a run as it was last started, or of a recipe with the installed software.

    The resolved recipe of a run is read without its plugins, so a missing one is no problem. With overrides
    it is loaded like any other recipe.

    Raises:
        TitanError: it does not exist, or is not valid.
    """
    from titancli.recipe import load_recipe

    path = Path(reference)
    if not RunFolder.is_run(path) or overrides or unset:
        return Side(load_recipe(reference, overrides, unset=unset).data, _installed())
    folder = RunFolder.open(path)
    attempts = folder.record().get("attempts") or [{}]
    return Side(_locked(folder), _software(attempts[-1].get("versions", {}), attempts[-1]))


def changes_between(one: Side, other: Side) -> tuple[list[Change], list[Change]]:
    """Return the keys of the recipe, and the software, that differ."""
    return changes(one.data, other.data), changes(one.software, other.software)


def side_of(run: Summary) -> Side:
    """Return a run's side as `read_side` does; without software if the run has no valid record.

    Raises:
        RecipeError: its lock file is not TOML.
    """
    newest = run.attempts[-1] if run.attempts else {}
    return Side(_locked(RunFolder(run.path)), _software(newest.get("versions") or {}, newest))


def spread(tables: Sequence[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return the keys in which several tables differ, each with its value in every table."""
    found: dict[str, list[Any]] = {}
    for number, table in enumerate(tables[1:], 1):
        for change in changes(tables[0], table):
            found.setdefault(change.key, [change.before] * len(tables))[number] = change.after
    return list(found.items())


def _locked(folder: RunFolder) -> dict[str, Any]:
    import tomli

    try:
        return tomli.loads(read_lock(folder.recipe_lock))
    except ValueError as error:
        raise RecipeError(f"{folder.recipe_lock} is not TOML: {error}") from error


def _installed() -> dict[str, str]:
    files = [{"path": str(file), "sha256": file_hash(file)} for file in plugin_files()]
    return _software(versions(), {"plugin_files": files})


def _software(found: dict[str, str], attempt: dict[str, Any]) -> dict[str, str]:
    """Return versions by distribution; a plugin file's version is the beginning of its hash."""
    files = attempt.get("plugin_files") or []
    return {**found, **{Path(file["path"]).name: f"sha256 {file['sha256'][:12]}" for file in files}}
