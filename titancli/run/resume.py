"""Choose the checkpoint from which a run resumes. Torch-free."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titancli.checkpoint import read_manifest
from titancli.checkpoint.format.manifest import names_and_sizes
from titancli.errors import EnvironmentProblem
from titancli.observe.summary import summarize
from titancli.run.request import Request, Where
from titancli.runs import STEP_NAME, RunFolder
from titancli.worker import remote

if TYPE_CHECKING:
    from titancli.recipe.schema import Checkpoint, Recipe


@dataclass(frozen=True)
class Choice:
    """The checkpoint from which a run continues."""

    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()
    """Messages for the user, one line each."""
    from_scratch: bool = False
    """Whether existing checkpoints are set aside, and the run starts at step 0."""

    @property
    def step(self) -> int:
        """Return the step of the checkpoint; 0 if there is none."""
        return 0 if self.checkpoint is None else _step_of(self.checkpoint)


def choose_checkpoint(request: Request, where: Where, recipe: Recipe) -> Choice:
    """Choose the newest good checkpoint, or that of `request.step`. One that exists only in a store is
    downloaded, except in a dry run.

    Raises:
        TitanError: there is none although the run has saved, all are damaged, or the store does not answer.
    """
    folder, step = where.folder, request.step
    if folder is None or (where.new and where.in_store is None):
        return Choice()
    if where.in_store is not None:
        found = where.in_store if step is None else _choose_step(folder, request, recipe.checkpoint, step)
        return Choice(found, where.notes)
    try:
        choice = _choose(folder, request, recipe, required=where.required)
    except EnvironmentProblem:
        folder.refuse_in_use()  # it may be in use, and the hint would be wrong
        raise
    return replace(choice, notes=tuple(dict.fromkeys((*where.notes, *choice.notes))))


def _choose(folder: RunFolder, request: Request, recipe: Recipe, *, required: bool) -> Choice:
    if request.step is not None:
        return Choice(_choose_step(folder, request, recipe.checkpoint, request.step))
    found, notes = _newest(folder, request, recipe)
    if found is not None:
        return Choice(found, notes)
    return _from_the_beginning(folder, request, recipe, notes, required=required)


def _newest(folder: RunFolder, request: Request, recipe: Recipe) -> tuple[Path | None, tuple[str, ...]]:
    """Return the newest good checkpoint, and messages about newer ones that cannot be used."""
    section, notes = recipe.checkpoint, list[str]()
    newest = partial(
        remote.newest, folder, section, rejected=notes.append, say=request.say, dry_run=request.dry_run
    )
    # Ranks hash what they load; check the contents here only if nothing will be loaded.
    ranks_verify = not (request.dry_run or request.from_scratch)
    verify = names_and_sizes(section.verify) if ranks_verify else section.verify
    found = newest(verify=verify)
    if found is not None and verify != section.verify and 0 < recipe.training.steps <= _step_of(found):
        found = newest(verify=section.verify)
    return found, tuple(dict.fromkeys(notes))


def _from_the_beginning(
    folder: RunFolder, request: Request, recipe: Recipe, notes: tuple[str, ...], *, required: bool
) -> Choice:
    """Start at step 0 if no saved step is lost by it, or `request.from_scratch` accepts the loss.

    Args:
        notes: messages about existing checkpoints that cannot be used.
    """
    section = recipe.checkpoint
    if notes and not (request.from_scratch and section.remote is None):
        remote.refuse_unusable(folder.path, notes, section)
    in_memory = section.copies is not None and section.copies.recorded(folder.checkpoints)
    if not request.from_scratch and not in_memory:
        remote.refuse_lost(folder, section)
        if required and not _has_done_nothing(folder):
            raise EnvironmentProblem(
                f"{folder.path} has no checkpoint to resume from",
                hint=f"start a new run: {request.command} {shlex.quote(str(folder.path))}; or restart this "
                "one at step 0: --from-scratch",
            )
    if notes:
        notes = (*notes, "the run starts at step 0; these checkpoints are set aside")
        return Choice(notes=notes, from_scratch=True)
    if request.from_scratch and (step := remote.recorded_step(folder)) is not None:
        lost = f"the run starts at step 0: nothing is left of step {step}, which it has saved"
        return Choice(notes=(lost,), from_scratch=True)
    if in_memory:
        return Choice(notes=("no checkpoint on the disk yet: it continues from memory, or starts at step 0",))
    return Choice(notes=("the run has no checkpoint yet: it starts at step 0",))


def _step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint. In a dry run it may only exist in an object store, or be damaged
    here."""
    named = STEP_NAME.match(checkpoint.name)
    return int(named[1]) if named else read_manifest(checkpoint).step


def _has_done_nothing(folder: RunFolder) -> bool:
    """Return whether a run has been started, and was stopped or failed before its first step."""
    found = summarize(folder.path)
    return bool(found.attempts) and not found.step


def _choose_step(folder: RunFolder, request: Request, section: Checkpoint, step: int) -> Path:
    """Return the checkpoint of `--step`; in a dry run it may only exist in the store."""
    taken = remote.take_step(folder, section, step, request.say, dry_run=request.dry_run)
    path = folder.checkpoints / f"step-{step}"
    if not (taken or path.is_dir()):
        there = ", ".join(map(str, remote.steps_of(folder, section)))
        raise EnvironmentProblem(
            f"{folder.path} has no checkpoint of step {step}",
            hint=f"available steps: {there}" if there else "the run has no checkpoints",
        )
    if not (taken and request.dry_run):
        read_manifest(path)
    return path
