"""Find the checkpoints of a run on this machine and in its store (`checkpoint.remote`). Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from titancli.checkpoint.format.manifest import (
    LOCK,
    DamagedCheckpoint,
    last_serial,
    newest_good,
    none_usable,
    read_manifest,
    steps,
)
from titancli.closing import finished, uploads_alone
from titancli.errors import EnvironmentProblem
from titancli.observe.events import backwards
from titancli.runs import STEP_NAME, RunFolder, timestamp

if TYPE_CHECKING:
    from titancli.checkpoint.format.manifest import Verify
    from titancli.checkpoint.remote.uploads import Uploads
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
    newer_than: int = 0,
    damaged: Mapping[Path, str] = MappingProxyType({}),
) -> Path | None:
    """Return the newest good checkpoint of a run. It is downloaded from the store if it is newer there, or
    damaged here.

    In a dry run nothing is downloaded, and the path is where the checkpoint would be. `newer_than` and
    `damaged`: see `newest_good`.

    Raises:
        TitanError: the store does not answer, or the disk is full.
    """
    if section.remote is None:
        return newest_good(
            folder.checkpoints, verify=verify, rejected=rejected, newer_than=newer_than, damaged=damaged
        )
    from titancli.checkpoint.remote.transfer import newest_of_both, run_place

    return newest_of_both(
        run_place(section, folder.path),
        folder.checkpoints,
        verify=verify,
        run_id=folder.record().get("run_id"),
        rejected=rejected,
        say=say,
        look_only=dry_run,
        newer_than=newer_than,
        damaged=damaged,
    )


def take_step(
    folder: RunFolder,
    section: Checkpoint,
    step: int,
    say: Say,
    *,
    damaged: str | None = None,
    dry_run: bool = False,
) -> bool:
    """Download one checkpoint if the run folder lacks it, or its manifest, and the store has it.

    Args:
        damaged: what is wrong with the one in the run folder; the store's replaces it.
        dry_run: download nothing.

    Returns:
        Whether the store's is downloaded, or in a dry run would be.

    Raises:
        DamagedCheckpoint: that one is `damaged`, and the store has none.
        TitanError: the store's is damaged, or another run's, the store does not answer, or the disk is full.
    """
    here = folder.checkpoints / f"step-{step}"
    if section.remote is None or (damaged is None and here in steps(folder.checkpoints)):
        return False
    from titancli.checkpoint.remote.transfer import run_place, take

    place = run_place(section, folder.path) / here.name
    if place.is_dir():
        run_id = folder.record().get("run_id")  # None in a dry run of a run that is not on this machine
        if run_id is not None and read_manifest(place).run_id != run_id:
            raise EnvironmentProblem(f"{place} was written by another run")
        take(place, folder.checkpoints, say, look_only=dry_run)
        return True
    if damaged is not None:
        raise DamagedCheckpoint(here, damaged)
    return False


def steps_of(folder: RunFolder, section: Checkpoint) -> list[int]:
    """Return the steps of a run that have a checkpoint folder, here or in the store, in order."""
    there = {path.name for path in folder.checkpoints.glob("step-*")}
    if section.remote is not None:
        from titancli.checkpoint.remote.transfer import run_place

        there |= {path.name for path in steps(run_place(section, folder.path))}
    return sorted(int(match[1]) for name in there if (match := STEP_NAME.match(name)))


def lower_serial(folder: RunFolder) -> None:
    """Lower the attempt's serial so that every checkpoint it saves from now on counts as its own: one from
    the store may be older than the one it has replaced, and serials continue from the highest that is
    left."""
    serial = last_serial(folder.checkpoints)
    if serial < folder.record()["attempts"][-1].get("serial", 0):
        folder.update_attempt(serial=serial)


def take_run(run_dir: Path, section: Checkpoint, *, rejected: Say, say: Say) -> bool:
    """Make the folder of a run that is only in the store, with its newest good checkpoint.

    The recipe is the one under which the checkpoint was saved, so that a resume is compared with it.
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


def require_uploadable(folder: RunFolder, section: Checkpoint, *, new: bool) -> None:
    """Check that this run's checkpoints can be uploaded, before anything takes time.

    Raises:
        EnvironmentProblem: the store cannot be written, or holds another run of this name.
    """
    if section.remote is None:
        return
    from titancli.checkpoint.remote.transfer import probe, run_place

    place = run_place(section, folder.path)
    if new and (there := steps(place)):
        raise EnvironmentProblem(
            f"{place} already holds the checkpoints of a run ({', '.join(path.name for path in there)})",
            hint="resume that run with --resume, or give this run another name: --run-dir DIR",
        )
    probe(place)


def uploads_of(
    folder: RunFolder, section: Checkpoint, run_id: str, leaving: Callable[[], bool] = lambda: False
) -> Uploads:
    """Make the uploads of a run's checkpoints to its store; see `Uploads` for `leaving`."""
    from titancli.checkpoint.remote.requests import LONG
    from titancli.checkpoint.remote.transfer import run_place
    from titancli.checkpoint.remote.uploads import Uploads

    return Uploads(
        folder.checkpoints,
        run_place(section, folder.path, patience=LONG),
        run_id,
        section.keep_latest_k,
        read_back=section.remote_read_back,
        leaving=leaving,
        exit_seconds=section.remote_exit_seconds,
    )


def upload_rest(folder: RunFolder, section: Checkpoint) -> None:
    """Upload the checkpoints that a finished run has not uploaded, if any.

    Raises:
        EnvironmentProblem: the run folder is in use.
        TitanError: the store does not accept them.
    """
    if section.remote is None or not section.enable:
        return
    from titancli.checkpoint.remote.transfer import alone

    with alone(folder.checkpoints):
        hold = folder.hold()
        try:
            uploads_of(folder, section, folder.record()["run_id"]).finish()
            attempt = folder.begun()["attempts"][-1]
            if uploads_alone(attempt, (attempt.get("closing") or {}).get("step", 0)):
                folder.update_attempt(**finished(attempt), ended=timestamp())
        finally:
            hold.release()


def refuse_unusable(run: Path, notes: Iterable[str], section: Checkpoint) -> None:
    """Refuse to start a run over silently if it has checkpoints that cannot be used.

    Raises:
        EnvironmentProblem: there are some.
    """
    if not notes:
        return
    hint = "start a new run in another folder: --run-dir DIR"
    if section.remote is None:
        hint = "repair one of them, or set them all aside and start at step 0: --from-scratch"
    raise none_usable(run, notes, hint=hint)


def recorded_step(folder: RunFolder) -> int | None:
    """Return a step that was saved according to run.json or the event log; None if nothing was, or everything
    has been set aside since (`--from-scratch`).

    Raises:
        EnvironmentProblem: run.json cannot be read.
    """
    attempts = folder.record().get("attempts") or []
    first = max((number for number, one in enumerate(attempts, 1) if one.get("from_scratch")), default=1)
    saved = None
    for event in backwards(folder.events):
        if event["event"] == "checkpoint" and saved is None:
            saved = event["step"]
        elif event["event"] == "run_start":
            number = event.get("attempt")
            if isinstance(number, int) and number < first:
                break
            if saved is not None:
                return int(saved)
    for attempt in reversed(attempts[first - 1 :]):
        outcome = attempt.get("outcome")
        ended = outcome.get("checkpoint") if isinstance(outcome, dict) else None
        for place in (Path(str(ended)), Path(str(attempt.get("checkpoint")))):
            if place.parent.name == folder.checkpoints.name and (named := STEP_NAME.match(place.name)):
                return int(named[1])
    return None


def refuse_lost(folder: RunFolder, section: Checkpoint) -> None:
    """Refuse to start a run over silently if it has saved checkpoints and has none now.

    Raises:
        EnvironmentProblem: it has saved some.
    """
    if (step := recorded_step(folder)) is None:
        return
    there = "holds no checkpoint" if folder.checkpoints.is_dir() else "does not exist"
    if section.remote is not None:
        from titancli.checkpoint.remote.transfer import run_place

        there += f", and {run_place(section, folder.path)} holds none either"
    raise EnvironmentProblem(
        f"{folder.path} has saved step {step} according to its record, but {folder.checkpoints} {there}",
        hint="is its disk not mounted, or was it purged? Restore the checkpoints, or start at step 0 with "
        "--from-scratch",
    )
