"""A run whose checkpoints lie in a store too (`checkpoint.remote`): how they come here. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from titancli.checkpoint.format.manifest import LOCK, newest_good, steps
from titancli.errors import EnvironmentProblem
from titancli.runs import RunFolder

if TYPE_CHECKING:
    from titancli.checkpoint.format.manifest import Verify
    from titancli.recipe.schema import Checkpoint

Say = Callable[[str], None]


def newest(
    folder: RunFolder,
    section: Checkpoint,
    *,
    verify: Verify,
    rejected: Say,
    say: Say,
    dry_run: bool = False,
) -> Path | None:
    """The newest good checkpoint of a run, which is taken from the store if it is newer there.

    In a dry run nothing is taken, and the path is the one that it would have.

    Raises:
        TitanError: the store does not answer, or the disk is full.
    """
    if section.remote is None:
        return newest_good(folder.checkpoints, verify=verify, rejected=rejected)
    from titancli.checkpoint.remote.transfer import newest_of_both, run_place

    return newest_of_both(
        run_place(section.remote, folder.path),
        folder.checkpoints,
        verify=verify,
        run_id=folder.record().get("run_id"),
        rejected=rejected,
        say=say,
        look_only=dry_run,
    )


def take_step(folder: RunFolder, section: Checkpoint, step: int, say: Say) -> None:
    """Take one checkpoint, where the run folder does not have it and the store does.

    Raises:
        TitanError: it is damaged, the store does not answer, or the disk is full.
    """
    if section.remote is None or (folder.checkpoints / f"step-{step}").is_dir():
        return
    from titancli.checkpoint.remote.transfer import run_place, take

    place = run_place(section.remote, folder.path) / f"step-{step}"
    if place.is_dir():
        take(place, folder.checkpoints, say)


def take_run(run_dir: Path, section: Checkpoint, *, rejected: Say, say: Say) -> bool:
    """Begin the folder of a run that is only in the store, with its newest good checkpoint.

    Its recipe is the one that the checkpoint was saved under, so that a resume is compared with that.
    """
    folder = RunFolder(run_dir)
    if section.remote is None or (run_dir.is_dir() and not folder.is_empty_but_for_checkpoints()):
        return False
    checkpoint = newest(folder, section, verify=section.verify, rejected=rejected, say=say)
    if checkpoint is None:
        return False
    folder.make()
    folder.write_recipe_lock((checkpoint / LOCK).read_text(encoding="utf-8"))
    return True


def see_to(folder: RunFolder, section: Checkpoint, *, new: bool) -> None:
    """See to it that this run's checkpoints can be uploaded, before anything takes time.

    Raises:
        EnvironmentProblem: the store cannot be written, or holds another run of this name.
    """
    if section.remote is None:
        return
    from titancli.checkpoint.remote.transfer import probe, run_place

    place = run_place(section.remote, folder.path)
    if new and (there := steps(place)):
        raise EnvironmentProblem(
            f"{place} already holds the checkpoints of a run ({', '.join(path.name for path in there)})",
            hint="resume that run with --resume, or give this run another name: --run-dir DIR",
        )
    probe(place)
