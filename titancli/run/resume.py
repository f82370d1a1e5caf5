"""Choose the checkpoint from which a run resumes. Torch-free."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
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


def choose_checkpoint(request: Request, where: Where, recipe: Recipe) -> Where:
    """Choose the newest good checkpoint of a run, or that of `request.step`; return where it starts then. One
    that exists only in a store is downloaded, except in a dry run.

    Raises:
        TitanError: there is none although the run has saved, all are damaged, or the store does not answer.
    """
    folder, step = where.folder, request.step
    if folder is None or (where.new and where.checkpoint is None):
        return where
    try:
        if step is not None:
            return replace(where, checkpoint=_choose_step(folder, request, recipe.checkpoint, step))
        if where.checkpoint is not None:
            return where
        found, notes = _newest(folder, request, recipe)
        if found is not None:
            return replace(where, checkpoint=found, notes=_once(where.notes, notes))
        from_scratch, begins = _from_the_beginning(folder, request, recipe, notes, required=where.required)
    except EnvironmentProblem:
        folder.refuse_in_use()  # it may be in use, and the hint would be wrong
        raise
    return replace(where, from_scratch=from_scratch, notes=_once(where.notes, notes, (begins,)))


def _once(*notes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain(*notes)))


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
    if found is not None and verify != section.verify and 0 < recipe.training.steps <= step_of(found):
        found = newest(verify=section.verify)
    return found, tuple(notes)


def _from_the_beginning(
    folder: RunFolder, request: Request, recipe: Recipe, notes: tuple[str, ...], *, required: bool
) -> tuple[bool, str]:
    """Start at step 0 if no saved step is lost by it, or `request.from_scratch` accepts the loss; return
    whether existing checkpoints are set aside, and a message.

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
        return True, "the run starts at step 0; these checkpoints are set aside"
    if request.from_scratch and (step := remote.recorded_step(folder)) is not None:
        return True, f"the run starts at step 0: nothing is left of step {step}, which it has saved"
    if in_memory:
        return False, "no checkpoint on the disk yet: it continues from memory, or starts at step 0"
    return False, "the run has no checkpoint yet: it starts at step 0"


def step_of(checkpoint: Path) -> int:
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
