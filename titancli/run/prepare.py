"""Decide what `titan train` will do: which folder, which recipe, from which checkpoint. Torch-free. Every
error that can be known in advance is reported here, before a process is started or a file is written."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titancli.checkpoint import read_manifest
from titancli.checkpoint.format.manifest import last_serial, names_and_sizes
from titancli.checkpoint.peers.memory import read_record
from titancli.data.hub import Hosted
from titancli.errors import EnvironmentProblem, PluginError, RecipeError, TitanError, UsageError
from titancli.observe.summary import summarize
from titancli.run.drift import Change, changes, sections
from titancli.run.inputs import require_inputs, tokenizer_folder
from titancli.runs import STEP_NAME, RunFolder
from titancli.worker import remote

if TYPE_CHECKING:
    from titancli.recipe import Loaded
    from titancli.recipe.schema import Checkpoint, Recipe


@dataclass(frozen=True)
class Request:
    """The arguments of the command line."""

    reference: str
    overrides: Sequence[str] = ()
    unset: Sequence[str] = ()
    run_dir: Path | None = None
    resume: bool = False
    step: int | None = None
    allow_drift: bool = False
    from_scratch: bool = False
    plugin_files: Sequence[Path] = ()
    dry_run: bool = False
    """Nothing will be started: missing files are listed instead of raising an error."""
    say: Callable[[str], None] = lambda line: None
    """Called with a message before something takes long."""
    command: str = "titan train"
    """The beginning of commands in hints."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    folder: RunFolder
    loaded: Loaded
    lock_text: str
    new: bool
    """Whether the run folder does not exist yet."""
    named_by_titan: bool = False
    """Whether titan chose the name of the folder."""
    checkpoint: Path | None = None
    start_step: int = 0
    drift: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Messages for the user, one line each."""
    allow_drift: bool = False
    """Whether data that are not those of the checkpoint are started from the beginning."""
    from_scratch: bool = False
    """Whether the run starts at step 0 and sets its remaining, unusable checkpoints aside."""
    step: int | None = None
    """The step of the requested checkpoint; no other one is used instead."""
    missing: list[str] = field(default_factory=list)
    """Files that the recipe names and that do not exist (dry runs only), one line each."""
    seen: tuple[int, int] | None = None
    """The result of `history` before anything was decided; None for a folder that titan names."""

    @property
    def finished(self) -> bool:
        """Return whether there is no step left to do."""
        return self.start_step >= self.loaded.recipe.training.steps


def history(folder: RunFolder) -> tuple[int, int]:
    """Return the number of attempts of a folder, and the serial of its newest checkpoint."""
    return len(folder.record().get("attempts") or ()), last_serial(folder.checkpoints)


def make_plan(request: Request) -> Plan:
    """Decide what to run.

    Raises:
        TitanError: the recipe is wrong, a folder or a checkpoint is missing or in the way, or the recipe does
            not match the run to continue.
    """
    run_dir = request.run_dir.absolute() if request.run_dir is not None else None
    if request.resume and run_dir is None:
        return _continue(request, RunFolder.open(_run_to_resume(request)), required=True)
    if run_dir is not None and RunFolder.is_run(run_dir):
        if not request.resume:
            again = f"{request.command} {request.reference} --run-dir {request.run_dir} --resume"
            raise EnvironmentProblem(
                f"the run folder {run_dir} already exists", hint=f"to resume it: {again}"
            )
        return _continue(request, RunFolder.open(run_dir), required=request.step is not None)
    if request.resume and run_dir is not None and (plan := _from_afar(request, run_dir)) is not None:
        return plan
    if request.step is not None:
        raise (
            EnvironmentProblem(f"run {run_dir} does not exist, so step {request.step} cannot be loaded")
            if request.resume
            else UsageError("--step selects the checkpoint to resume from", hint="add --resume")
        )
    return _begin(request, run_dir)


def _begin(request: Request, run_dir: Path | None, checkpoint: Path | None = None) -> Plan:
    from titancli.recipe import load_recipe, lock_text

    loaded = load_recipe(request.reference, request.overrides, unset=request.unset)
    if pins := _pins(request, loaded.recipe):
        loaded = load_recipe(request.reference, [*request.overrides, *pins], unset=request.unset)
    missing = require_inputs(loaded, checkpoint, dry_run=request.dry_run, say=request.say)
    folder = RunFolder.choose(loaded.recipe.name, run_dir)
    if not request.dry_run:
        remote.require_uploadable(folder, loaded.recipe.checkpoint, new=not request.resume)
    return Plan(
        folder=folder,
        loaded=loaded,
        lock_text=lock_text(loaded),
        new=True,
        named_by_titan=run_dir is None,
        missing=missing,
        seen=None if run_dir is None else history(folder),
    )


def _pins(request: Request, recipe: Recipe, before: Recipe | None = None) -> list[str]:
    """Return overrides that pin repositories, named in the recipe instead of folders, to a commit: that of
    the run to continue, or else the current one. A dry run looks nothing up."""
    named = {"tokenizer.path": Hosted.of(tokenizer_folder(recipe)), "weights": Hosted.of(recipe.weights)}
    known: dict[str, Hosted | None] = {}
    if before is not None:
        known = {"tokenizer.path": Hosted.of(tokenizer_folder(before)), "weights": Hosted.of(before.weights)}
    overrides = []
    for key, hosted in named.items():
        if hosted is None or hosted.is_pinned or request.dry_run:
            continue
        pinned = known.get(key)
        anew = hosted.revision is not None and (request.allow_drift or request.from_scratch)
        if pinned is None or pinned.repository != hosted.repository or anew:
            request.say(f"looking up the commit of {hosted.url}")
            pinned = hosted.fetch(weights=key == "weights")
        elif hosted.revision is not None:
            request.say(f"{key}: the run keeps {pinned.url}; --allow-drift takes {hosted.url} as it is now")
        overrides.append(f'{key}="{pinned.url}"')
    return overrides


def _from_afar(request: Request, run_dir: Path) -> Plan | None:
    """Continue a run that is not on this machine, if its checkpoints are in an object store."""
    from titancli.recipe import load_recipe

    section = load_recipe(request.reference, request.overrides, unset=request.unset).recipe.checkpoint
    notes: list[str] = []
    if section.remote is not None and request.dry_run:
        found = remote.newest(
            RunFolder(run_dir),
            section,
            verify=section.verify,
            rejected=notes.append,
            say=request.say,
            dry_run=True,
        )
        if found is None:
            remote.refuse_unusable(run_dir, notes, section)
            return None
        if request.step is not None:
            found = _choose_step(RunFolder(run_dir), request, section, request.step)
        plan = _begin(request, run_dir, found)
        return replace(plan, checkpoint=found, start_step=_step_of(found), notes=notes)
    if not remote.take_run(run_dir, section, rejected=notes.append, say=request.say):
        remote.refuse_unusable(run_dir, notes, section)
        return None
    plan = _continue(request, RunFolder.open(run_dir), required=True)
    return replace(plan, notes=list(dict.fromkeys(notes + plan.notes)))


def _step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint. In a dry run it may only exist in an object store, or be damaged
    here."""
    named = STEP_NAME.match(checkpoint.name)
    return int(named[1]) if named else read_manifest(checkpoint).step


def _continue(request: Request, folder: RunFolder, *, required: bool) -> Plan:
    """Plan to continue a run. If `required`, refuse to start over at step 0 after steps that were not
    saved."""
    from titancli.recipe import load_recipe, lock_text

    reference = folder.path if request.run_dir is None else request.reference
    try:
        loaded = load_recipe(reference, request.overrides, unset=request.unset, run=folder.path)
        before = load_recipe(folder.path)
        if pins := _pins(request, loaded.recipe, before.recipe):
            overrides = [*request.overrides, *pins]
            loaded = load_recipe(reference, overrides, unset=request.unset, run=folder.path)
    except (PluginError, RecipeError) as error:
        raise _with_missing_plugins(error, folder, request.plugin_files) from error
    drift = changes(before.data, loaded.data)
    refused = [change for change in drift if change.guarded]
    if refused and not request.allow_drift:
        listed = "\n".join(f"  {change}" for change in refused)
        raise EnvironmentProblem(
            f"{folder.path} was started with a different {' and '.join(sections(refused))}:\n{listed}",
            hint="start a new run, or resume anyway with --allow-drift",
        )
    section = loaded.recipe.checkpoint
    attempts, serial = history(folder)
    try:
        checkpoint, notes, from_scratch = _choose_checkpoint(
            folder, request, loaded.recipe, required=required
        )
    except EnvironmentProblem:
        folder.refuse_in_use()  # it may be in use, and the hint would be wrong
        raise
    if section.remote is not None:  # a checkpoint may have been downloaded
        serial = last_serial(folder.checkpoints)
    start_step = _step_of(checkpoint) if checkpoint is not None else 0
    if not request.dry_run:
        remote.require_uploadable(folder, section, new=False)
    missing = require_inputs(loaded, checkpoint, dry_run=request.dry_run, say=request.say)
    return Plan(
        folder=folder,
        loaded=loaded,
        lock_text=lock_text(loaded),
        new=False,
        checkpoint=checkpoint,
        start_step=start_step,
        drift=drift,
        notes=notes,
        allow_drift=request.allow_drift,
        from_scratch=from_scratch,
        step=request.step,
        missing=missing,
        seen=(attempts, serial),
    )


def _run_to_resume(request: Request) -> Path:
    from titancli.recipe import find_recipe

    path = Path(request.reference)
    if RunFolder.is_run(path):
        return path
    if path.suffix != ".toml" and (path.is_dir() or "/" in request.reference):
        RunFolder.open(path)  # raises, saying what is missing
    find_recipe(request.reference)  # the recipe does not exist either
    start = request.command
    raise UsageError(
        f"--resume needs a run folder, but {request.reference!r} is a recipe",
        hint=f"{start} RUN --resume, or {start} {request.reference} --run-dir DIR --resume",
    )


def _choose_checkpoint(
    folder: RunFolder, request: Request, recipe: Recipe, *, required: bool
) -> tuple[Path | None, list[str], bool]:
    """Return the checkpoint to continue from, notes, and whether existing ones are set aside for a new
    start."""
    section, last_step = recipe.checkpoint, recipe.training.steps
    if (step := request.step) is not None:
        return _choose_step(folder, request, section, step), [], False
    notes: list[str] = []
    newest = partial(remote.newest, folder, section, say=request.say, dry_run=request.dry_run)
    # Ranks hash what they load; check the contents here only if nothing will be loaded.
    ranks_verify = not (request.dry_run or request.from_scratch)
    verify = names_and_sizes(section.verify) if ranks_verify else section.verify
    path_or_none = newest(verify=verify, rejected=notes.append)
    if path_or_none is not None and verify != section.verify and _step_of(path_or_none) >= last_step:
        path_or_none = newest(verify=section.verify, rejected=notes.append)
        notes = list(dict.fromkeys(notes))
    if path_or_none is not None:
        return path_or_none, notes, False
    if notes and not (request.from_scratch and section.remote is None):
        remote.refuse_unusable(folder.path, notes, section)
    in_memory = recipe.checkpoint.peer_interval and read_record(folder.checkpoints) is not None
    if not request.from_scratch and not in_memory:
        remote.refuse_lost(folder, section)
    if required and not request.from_scratch and not in_memory and not _has_done_nothing(folder):
        raise EnvironmentProblem(
            f"{folder.path} has no checkpoint to resume from",
            hint=f"start a new run: {request.command} {shlex.quote(str(folder.path))}; or restart this one "
            "at step 0: --from-scratch",
        )
    if notes:
        return None, [*notes, "the run starts at step 0; these checkpoints are set aside"], True
    if request.from_scratch and (step := remote.recorded_step(folder)) is not None:
        return None, [f"the run starts at step 0: nothing is left of step {step}, which it has saved"], True
    if in_memory:
        return None, ["no checkpoint on the disk yet: it continues from memory, or starts at step 0"], False
    return None, ["the run has no checkpoint yet: it starts at step 0"], False


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


# ---------------------------------------------------------------------------------------------- plugins


def _recorded_plugin_files(folder: RunFolder) -> list[dict[str, str]]:
    attempts = folder.record().get("attempts") or [{}]
    return attempts[-1].get("plugin_files") or []


def _with_missing_plugins(error: TitanError, folder: RunFolder, given: Sequence[Path]) -> TitanError:
    """Return the error, or one that says which `-p` of the run is missing now."""
    missing = [e["path"] for e in _recorded_plugin_files(folder) if e["path"] not in set(map(str, given))]
    if not missing:
        return error
    flags = " ".join(f"-p {path}" for path in missing)
    return PluginError(
        f"{folder.path} was started with {flags}; without it: {error.message}", hint=f"add {flags}"
    )
