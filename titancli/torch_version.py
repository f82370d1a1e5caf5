"""The versions of torch that titan supports, and the shortcomings of the older ones. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from titancli.errors import EnvironmentProblem
from titancli.tested_systems import TORCH

if TYPE_CHECKING:
    from packaging.version import Version

OLDEST, *_, NEWEST = TORCH
"""The first version that titan runs on, and the last that its tests have been run on: `tests/versions.sh`."""


@dataclass(frozen=True)
class Lack:
    """Something that versions of torch before `since` cannot do, and that titan refuses on them."""

    what: str
    since: str
    why: str


SPLIT_BACKWARD = Lack(
    "pipeline schedules that split backward (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV)",
    since="2.13",
    # `stage_backward_weight`: the graph of an autograd.Function at a stage's end is freed before its weights'
    # gradients are made, and what one use of a weight gives to an earlier use of it is added twice.
    why="their gradients of weights are wrong, or raise an error",
)
LACKS = (SPLIT_BACKWARD,)


def torch_version() -> Version | None:
    """Return the installed torch, by its metadata; None if there is none."""
    from packaging.version import Version

    try:
        return Version(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return None


def older_than(version: str) -> bool:
    """Return whether the installed torch is older; False where none is installed."""
    from packaging.version import Version

    installed = torch_version()
    return installed is not None and installed.release < Version(version).release


def lacks(lack: Lack) -> bool:
    """Return whether the installed torch is too old for something; False where none is installed."""
    return older_than(lack.since)


def untested() -> str | None:
    """Return a warning about a torch newer than the tested versions; None for any other."""
    from packaging.version import Version

    installed = torch_version()
    if installed is None or installed.release[:2] <= Version(NEWEST).release:
        return None
    return f"torch {installed} is newer than {NEWEST}, the last version that titan has been tested with"


def check_torch() -> None:
    """Refuse a torch that titan does not run on.

    Raises:
        EnvironmentProblem: the installed torch is older than `OLDEST`.
    """
    if older_than(OLDEST):
        raise EnvironmentProblem(
            f"torch {torch_version()} is too old: titan runs on {OLDEST} to {NEWEST}",
            hint=f"pip install 'torch>={OLDEST}'",
        )
