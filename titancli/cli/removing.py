"""What `titan runs rm` may remove, the question before it, and the removal."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from titancli.cli.output import note, short_path
from titancli.errors import EnvironmentProblem, UsageError
from titancli.runs import LOCK_NAME, RunFolder
from titancli.signals import say
from titancli.terminal import printable

if TYPE_CHECKING:
    from titancli.observe.summary import Summary

FAILED = ("failed", "died")
SHOWN = 20
"""Names that are listed at most."""


def came_to_nothing(run: Summary) -> bool:
    """Return whether a run failed, died, or was stopped before its first step, and has no checkpoint."""
    ended = run.state in FAILED or (run.state in ("stopped", "interrupted") and not run.step)
    return ended and not run.checkpoints


def removable(path: Path) -> Path:
    """Return the run folder.

    Raises:
        EnvironmentProblem: it is a link, or not a run folder.
    """
    if path.is_symlink():
        raise EnvironmentProblem(f"{path} is a link", hint=f"give the run itself: {os.path.realpath(path)}")
    return RunFolder.open(path).path


def refuse_in_use(run: Summary) -> None:
    """Raise an error if a run is, or may be, in use.

    Raises:
        EnvironmentProblem: a process works in the folder, or may do so on another machine.
    """
    if run.state == "unknown" and run.attempts:
        raise EnvironmentProblem(
            f"{run.path} may still be running: {'; '.join(run.problems)}",
            hint=f"run this command on {run.host}",
        )
    RunFolder(run.path).refuse_in_use()


OWN = re.compile(
    r"recipe\.(lock(\.\d+)?|next)\.toml|(run|note|profile)\.json|events\.jsonl|(run|ranks)\.lock|logs"
    r"|checkpoints(\.\d+)?|exports|best|digests|rollouts|evaluations|sources|rendezvous|slurm"
    r"|profile_traces|memory_snapshot|profile\.request|metrics\.csv|tb|\..*"
)
"""What runs write, by name; other entries of a run folder are named before they are removed."""


def tell(run: Summary) -> None:
    """Say what goes with a run: how many checkpoints, and the names of its exports and of what is not
    known to be a run's."""
    from titancli.checkpoint.format.disk import size_text

    saved = f"{len(run.checkpoints)} checkpoint{'' if len(run.checkpoints) == 1 else 's'}"
    step = "no step" if run.step is None else f"step {run.step}"
    about = ", ".join((run.state.replace("_", " "), step, saved, size_text(_size(run.path))))
    say(printable(f"  {short_path(run.path)}: {about}"))
    names = sorted(path.name for path in run.path.iterdir())
    exports = run.path / "exports"
    if exports.is_dir() and not exports.is_symlink():
        _tell_names("exports", sorted(path.name for path in exports.iterdir() if path.name[0] != "."))
    _tell_names("other files", [name for name in names if not OWN.fullmatch(name)])


def _tell_names(what: str, names: list[str]) -> None:
    shown = names[:SHOWN] + ([f"{len(names) - SHOWN} more"] if len(names) > SHOWN else [])
    if shown:
        say(printable(f"    {what}: {', '.join(shown)}"))


def confirmed(runs: list[Summary]) -> bool:
    """Return whether the user agrees to remove the runs.

    Raises:
        UsageError: there is no terminal to ask at.
    """
    if not sys.stdin.isatty():
        raise UsageError("not a terminal, so the removal cannot be confirmed", hint="add --yes")
    return click.confirm(f"Remove {len(runs)} run{'' if len(runs) == 1 else 's'}?", err=True)


def _size(folder: Path) -> int:
    """Return the size in bytes of the files below a folder; links are not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def remove(folder: RunFolder) -> None:
    """Remove a run. The files that mark the folder as a run go last, so that a failed removal can be
    repeated.

    Raises:
        EnvironmentProblem: it is in use, or something in it cannot be removed.
    """
    hold = folder.hold()
    try:
        for entry in folder.path.iterdir():
            if entry.is_symlink():
                note(f"{short_path(entry)} is a link; what it leads to stays: {os.path.realpath(entry)}")
                entry.unlink()
            elif entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in (LOCK_NAME, "run.lock"):
                entry.unlink()
        folder.recipe_lock.unlink()
        folder.path.joinpath("run.lock").unlink()
        folder.path.rmdir()
    except OSError as error:
        raise EnvironmentProblem(
            f"{error.filename or folder.path} cannot be removed: {error.strerror}",
            hint=f"the remaining files of the run are in {folder.path}",
        ) from error
    finally:
        hold.release()
