"""The records of a run, for commands that compare runs or rerun a part of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titancli.observe.machine import machine
from titancli.provenance import PATCH_NAME, file_hash, kept_source, provenance
from titancli.run.code_drift import (
    Difference,
    Effect,
    changed,
    plugin_changes,
    software_changes,
    used_plugins,
)
from titancli.run.drift import Change, changes
from titancli.run.inputs import require_inputs

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

__all__ = [
    "PATCH_NAME",
    "Change",
    "Difference",
    "Effect",
    "changed",
    "changes",
    "data_identity",
    "file_hash",
    "kept_source",
    "machine",
    "plugin_changes",
    "provenance",
    "require_inputs",
    "software_changes",
    "used_plugins",
]


def data_identity(recipe: Recipe) -> dict[str, Any] | None:
    """Return the identity of the data that a run records; None if it cannot be determined. The data are
    opened, but not read further; imports torch.

    Raises:
        TitanError: the data do not exist.
    """
    from titancli.worker.data import read_identity

    return read_identity(recipe)
