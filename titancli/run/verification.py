"""Check all data of a recipe or a run: read every byte, whatever the modification times."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from titancli.errors import TitanError
from titancli.fingerprint import Contents, FullCheck
from titancli.worker.data import read_dataset, read_identity

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@dataclass
class Verification:
    """The result of a check."""

    files: int = 0
    bytes: int = 0
    compared: int = 0
    """The number of files that were compared with stored checksums."""
    of_run: bool = False
    """Whether the identity of the data was compared with the run's record."""
    not_read: list[str] = field(default_factory=list)
    """Data that were not read."""
    faults: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return the result as plain JSON."""
        return {"ok": not self.faults, **vars(self)}


def verify_data(
    recipe: Recipe, recorded: Mapping[str, Any] | None, report: Callable[[int], None]
) -> Verification:
    """Read all files of the datasets of a recipe, including those for validation.

    Token shards are compared with their index, files that were read before with their stored checksums, and
    all data with the identity in the run's record.
    """
    found = Verification(of_run=recorded is not None)
    sets: dict[str, Callable[[], dict[str, Any] | None]] = {"dataset": partial(read_identity, recipe)}
    for name, config in recipe.validation.datasets.items():
        sets[f"validation.datasets.{name}"] = partial(read_dataset, recipe, config)
    with FullCheck(report) as check:
        for name, read in sets.items():
            before = check.bytes
            try:
                identity = read()
            except TitanError as error:
                found.faults.append(f"{name}: {error.message}")
                continue
            if name == "dataset" and recorded is not None:
                found.faults += [f"{name}: {said}" for said in _changed_identity(recorded, identity or {})]
            if check.bytes == before:
                found.not_read.append(f"{name}: it has no files to read here")
    found.faults += check.faults
    found.not_read += check.left_out
    found.files, found.bytes, found.compared = len(check.files), check.bytes, check.compared
    return found


def _changed_identity(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between the data and those in the run's record."""
    plain = json.loads(json.dumps(now))
    return [
        f"{name} was {recorded.get(name)} when the run began, and is {plain.get(name)}"
        for name in dict.fromkeys((*recorded, *plain))
        if recorded.get(name) not in (plain.get(name), _before(now.get(name)))
    ]


def _before(value: Any) -> Any:
    return value.ends if isinstance(value, Contents) else value
