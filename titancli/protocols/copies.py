"""Copies of a run's state outside of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class Copies(Protocol):
    """Keeps the newest state of a run where it is saved and loaded faster than on the disk. All methods are
    collective.

    `pieces` are this rank's tensors (`titancli.checkpoint.format.storage.Pieces`), `draft` is the checkpoint
    that would be saved of them (`titancli.checkpoint.save.Draft`), `plan` says which rank writes what, and
    `group` is a process group for this alone; None: the default one.
    """

    interval: int
    """Steps between two copies."""
    folder: Path | None
    """The folder that `newest` has returned, until `loaded` or `discard` is called."""

    def newest(self, *, wanted: bool) -> Path | None:
        """Return a folder from which the newest state can be loaded; None: none can be used, and all were
        discarded.

        Args:
            wanted: whether the run continues from its newest state, and not from another checkpoint.
        """
        ...

    def loaded(self) -> bool:
        """Return whether the load, which has succeeded, was from a copy."""
        ...

    def discard(self) -> None:
        """Invalidate all copies."""

    def reserve(self, pieces: Any, plan: Any, group: Any) -> None:
        """Ensure that there is room for copies.

        Raises:
            EnvironmentProblem: there is not; raised on all ranks.
        """

    def make(self, pieces: Any, draft: Any, plan: Any, group: Any) -> None:
        """Copy the state; may be called in a thread.

        Raises:
            EnvironmentProblem: it cannot be copied; raised on all ranks, and the run continues.
        """

    def saved(self) -> None:
        """Note that a checkpoint was saved on the disk."""

    def end(self) -> None:
        """Delete everything: the run has saved its last state on the disk."""

    def close(self) -> None:
        """Release what is held; what was copied stays."""


class CopiesBuilder(Protocol):
    def __call__(self, config: Any, *, checkpoints: Path, run_id: str, attempt: int) -> Copies:
        """Open the copies of a run; collective.

        Args:
            checkpoints: the run's folder of checkpoints, on the disk that all nodes share.
            attempt: the number of the run's attempt, counted from 1.

        Raises:
            EnvironmentProblem: they cannot be opened on a node; raised on all ranks.
        """
        ...
