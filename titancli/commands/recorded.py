"""The records of a run, for commands that compare runs or rerun a part of one."""

from titancli.run.code_drift import (
    NO_EFFECT,
    Difference,
    Effect,
    changed,
    plugin_changes,
    software_changes,
    used_plugins,
)
from titancli.run.drift import Change, changes
from titancli.run.inputs import require_inputs

__all__ = [
    "NO_EFFECT",
    "Change",
    "Difference",
    "Effect",
    "changed",
    "changes",
    "plugin_changes",
    "require_inputs",
    "software_changes",
    "used_plugins",
]
