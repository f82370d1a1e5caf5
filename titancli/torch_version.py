"""What the torch that is installed cannot do, of the versions that titan takes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.version import Version


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
    """The installed torch, by its metadata; None where there is none."""
    from packaging.version import Version

    try:
        return Version(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return None


def lacks(lack: Lack) -> bool:
    """Whether the installed torch is too old; False where none is installed."""
    from packaging.version import Version

    version = torch_version()
    return version is not None and version.release < Version(lack.since).release
