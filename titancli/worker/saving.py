"""Save a run: its checkpoints, their copies in an object store, and at its end the weights alone."""

from __future__ import annotations

import itertools
import logging
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titancli.checkpoint import Checkpointer
from titancli.checkpoint.save import refuse_link
from titancli.closing import CALLBACKS, EVALUATION, UPLOADS, closing_before
from titancli.distributed.together import Ranks
from titancli.errors import TitanError
from titancli.loops.closing import Closing
from titancli.registry.component import build
from titancli.runs import Claim, RunFolder
from titancli.signals import NODES_JOIN
from titancli.terminal import shell_path

if TYPE_CHECKING:
    from titancli.checkpoint.remote.uploads import Uploads
    from titancli.engine import Engine
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers
    from titancli.protocols import Copies
    from titancli.recipe.schema import Checkpoint, Recipe
    from titancli.worker.run_context import RunContext

EXPORTS = "exports/"

logger = logging.getLogger(__name__)


def open_uploads(context: RunContext, run: Run) -> Uploads | None:
    """Start the uploads of checkpoints to the recipe's object store, with those that earlier attempts have
    left here; None without a store, and on ranks other than 0."""
    section = context.recipe.checkpoint
    if section.remote is None or dist.get_rank() != 0:
        return None
    from titancli.worker.remote import uploads_of

    def leaving() -> bool:
        return run.signal is not None or run.stop.requested not in (None, NODES_JOIN.name)

    uploads = uploads_of(context.folder, section, context.run_id, leaving)
    uploads.wake()
    return uploads


def open_copies(recipe: Recipe, folder: RunFolder, record: dict[str, Any], stack: ExitStack) -> Copies | None:
    """Open the copies of the run's state; None if the recipe has none. Collective.

    Raises:
        EnvironmentProblem: they cannot be opened on a node.
    """
    section, loop = recipe.checkpoint, recipe.loop
    if not (section.enable and section.copies is not None and loop.trains):
        return None
    known = {"run_id": record["run_id"], "attempt": len(record["attempts"])}
    copies: Copies = build(section.copies, checkpoints=folder.checkpoints, **known)
    stack.callback(copies.close)
    return copies


@contextmanager
def saved(context: RunContext, engine: Engine, run: Run, observers: Observers) -> Iterator[None]:
    """Save checkpoints inside the block, and the exports of the run after it."""
    if not context.trains:
        yield
        return
    section = context.recipe.checkpoint
    run.closing = open_closing(context, engine, run)
    uploads = open_uploads(context, run)
    if section.enable:
        run.checkpoints = open_checkpoints(context, engine, run, observers, uploads)
        if context.copies is not None or section.async_mode == "async_with_pinned_mem":
            run.checkpoints.reserve(engine.live_state()[0])
    with settled(uploads):
        yield
        leave_behind(context, engine, run)
    if context.copies is not None:
        context.copies.end()


def open_checkpoints(
    context: RunContext, engine: Engine, run: Run, observers: Observers, uploads: Uploads | None
) -> Checkpointer:
    """Make the checkpointer of the run."""

    def announce(step: int, path: Path) -> None:
        run.saved(step, path)
        observers.checkpoint_saved(step, path)

    return Checkpointer(
        context.folder.checkpoints,
        context.recipe.checkpoint,
        lock_text=context.lock_text,
        run_id=context.run_id,
        mesh=asdict(engine.mesh.degrees),
        kept=engine.kept,
        on_saved=announce,
        uploads=uploads,
        from_zero=context.checkpoint is None,
        claim=Claim.of(context.folder, context.record),
        spared=perhaps_at_work(context.record),
        copies=context.copies,
    )


def perhaps_at_work(record: dict[str, Any]) -> list[str]:
    """Return the tokens of earlier attempts that may still be running: they are on other hosts, have no
    outcome, and their locks may not be visible here."""
    *earlier, _ = record["attempts"]
    here = socket.gethostname()
    return [
        attempt["token"]
        for attempt in earlier
        if "token" in attempt and not attempt.get("outcome") and attempt.get("host") != here
    ]


@contextmanager
def settled(uploads: Uploads | None) -> Iterator[None]:
    """Wait for uploads if the run fails inside the block, so that saved checkpoints reach the object
    store."""
    try:
        yield
    except TitanError:
        if uploads is not None:
            uploads.settle()
        raise


def leave_behind(context: RunContext, engine: Engine, run: Run) -> None:
    """Write the exports of a finished run, and finish its uploads."""
    if run.checkpoints is None:
        return
    for name in run.closing.left if run.closing is not None and run.has_ended else ():
        if name.startswith(EXPORTS):
            target = context.folder.path / name
            run.close(name, partial(_export, context.recipe.checkpoint, engine, run.checkpoints, target))
    in_store = all(Ranks().gather(run.checkpoints.finish_uploads()))
    if run.has_ended and not in_store:
        run.stopped_by(run.stop.requested)  # so that the exit code tells the caller to resume
    elif run.closing is not None and run.has_ended:
        run.closing.done(UPLOADS)


def open_closing(context: RunContext, engine: Engine, run: Run) -> Closing:
    """Return what the run has left after its last step; if that is done already, the loop does no other."""
    known = closing_before(context.record["attempts"], engine.step) if engine.step else None
    claim = Claim.of(context.folder, context.record)

    def record(closing: dict[str, Any]) -> None:
        claim.check()
        context.folder.update_attempt(closing=closing)

    if known is not None and known["left"] and known.get("why") == "finished" and engine.step < run.steps:
        run.end_early(f"step {engine.step} was its last one")  # as a callback had decided
    return Closing(known, partial(wanted_at_end, context.recipe, context.folder.path), record)


def wanted_at_end(recipe: Recipe, run_folder: Path, step: int, chosen: Sequence[str]) -> list[str]:
    """Return all that a run does after its last step, in order. An export for transformers gets a name that
    is free, unless one was `chosen` before."""
    section = recipe.checkpoint
    wanted = [EVALUATION] * bool(recipe.validation.datasets) + [CALLBACKS] * bool(recipe.callbacks)
    if not section.enable:
        return wanted
    if section.last_save_model_only:
        wanted.append(f"{EXPORTS}step-{step}")
    if section.last_save_in_hf:
        name = f"{EXPORTS}step-{step}-hf"
        numbered = re.compile(re.escape(name) + r"(-\d+)?\Z")
        names = (f"{name}{f'-{number}' * (number > 1)}" for number in itertools.count(1))
        mine = next(filter(numbered.match, chosen), None)
        wanted.append(mine or next(name for name in names if not (run_folder / name).exists()))
    return wanted + [UPLOADS] * (section.remote is not None)


def _export(section: Checkpoint, engine: Engine, checkpointer: Checkpointer, target: Path) -> bool:
    """Write `exports/step-N`, weights alone, or `exports/step-N-hf`. Collective.

    The last checkpoint is already on the disk: a failure here loses nothing.

    Raises:
        EnvironmentProblem: the disk is full, or cannot be written.
        TitanError: the model has no Hugging Face form.
    """
    if target.name != f"step-{engine.step}":
        checkpointer.on_main(f"exporting {target.name}", partial(_to_hf, section, engine.step, target))
        return True
    dtype = getattr(torch, section.export_dtype)
    tensors = {
        f"model.{parameter}": tensor.to(dtype) if tensor.is_floating_point() else tensor
        for parameter, tensor in engine.plain_parameters()
    }
    checkpointer.save_apart(target, tensors)
    logger.info("weights only: %s", shell_path(target))
    return True


def _to_hf(section: Checkpoint, step: int, target: Path) -> None:
    from titancli.checkpoint.hf.convert import to_hf

    refuse_link(target.parent)
    if target.exists():  # whole: the attempt that chose its name was killed before it could record it
        return
    target.parent.mkdir(exist_ok=True)
    source = target.parent.parent / "checkpoints" / f"step-{step}"
    to_hf(source, target, dtype=section.export_dtype, say=logger.debug)
    logger.info("Hugging Face folder: %s", shell_path(target))
