"""Repeat steps of a recorded run from its nearest checkpoint, in another folder. Imports torch late."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_proof import reproduce
from titan_proof.bisect import Side
from titan_proof.digests import StepDigest, read_digests
from titan_proof.origin import checkpoint_before, origin_of
from titan_proof.reproduction import Reproduction
from titancli.checkpoint import read_manifest
from titancli.commands.starting import Plan, Request, make_plan
from titancli.errors import EnvironmentProblem, TitanError
from titancli.runs import RunFolder


@dataclass(frozen=True)
class Repetition:
    """A step of a run, computed again."""

    start: int
    """The step of the checkpoint from which it began; 0: the beginning of the run."""
    digest: StepDigest
    checkpoint: Path
    """The checkpoint of the step, in the folder of the repetition."""


def repeat(
    side: Side,
    step: int,
    folder: Path,
    *,
    plugin_files: Sequence[Path] = (),
    traceback: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Repetition:
    """Repeat a run up to a step, from its newest checkpoint before that step.

    Args:
        folder: the run folder to make for the repetition; it must not exist.

    Raises:
        TitanError: the run, its data or its plugins are not here, or the repetition did not reach the step.
    """
    if side.folder is None:
        raise EnvironmentProblem(f"the run folder of {side.run.name} is not here")
    source = RunFolder(side.folder)
    digest = side.digests.get(step)
    origin = origin_of(source, None if digest is None else digest.attempt)
    checkpoint, _ = checkpoint_before(source, step, origin)
    run = replace(side.run, recipe=origin.recipe, launch=origin.launch)
    start = 0 if checkpoint is None else read_manifest(checkpoint).step
    if checkpoint is not None and start:
        _skeleton(source, checkpoint, origin.recipe, folder)
    made = _plan(run, start, step, folder, plugin_files, say)
    wanted = reproduce.request(run, made, None, traceback=traceback)
    code, error = reproduce.launch(made, wanted, lambda folder: None)
    if error is not None:
        raise error
    again = read_digests(folder).get(step)
    if code or again is None:
        raise TitanError(f"the repetition of {side.run.name} did not reach step {step} (exit code {code})")
    return Repetition(start, again, RunFolder(folder).checkpoints / f"step-{step}")


def _plan(
    run: Reproduction,
    start: int,
    step: int,
    folder: Path,
    plugin_files: Sequence[Path],
    say: Callable[[str], None],
) -> Plan:
    own = [
        "checkpoint.enable=true",
        f"checkpoint.interval={step + 1}",
        "checkpoint.keep_latest_k=0",
        "debug.digests=true",
    ]
    if start == 0:
        return reproduce.plan(
            run, overrides=own, steps=step, run_dir=folder, plugin_files=plugin_files, say=say
        )
    try:
        return make_plan(
            Request(
                reference=str(folder),
                overrides=[*reproduce.shortened(run, step), *own],
                unset=["checkpoint.remote"],
                resume=True,
                step=start,
                plugin_files=plugin_files,
                say=say,
                nproc=run.launch.get("nproc"),
                env=reproduce.environment(run),
            )
        )
    except TitanError as error:
        raise reproduce.with_what_helps(error, run, plugin_files) from error


def _skeleton(source: RunFolder, checkpoint: Path, recipe: str, folder: Path) -> None:
    """Make a run folder with one checkpoint of a run, for a resume; files are linked and not copied."""
    made = RunFolder(folder)
    try:
        made.checkpoints.mkdir(parents=True)
        made.recipe_lock.write_text(recipe, encoding="utf-8")
        shutil.copy(source.record_file, folder)
        shutil.copytree(checkpoint, made.checkpoints / checkpoint.name, copy_function=_link)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {folder}: {error.strerror or error}") from error


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy if the file system has no hard links."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)
