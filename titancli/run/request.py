"""The request of a command, and the run folder that it means: a new one, or one to resume. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titancli.checkpoint.format.manifest import last_serial
from titancli.errors import EnvironmentProblem, UsageError
from titancli.runs import RunFolder
from titancli.worker import remote


@dataclass(frozen=True)
class Request:
    """What a command that starts ranks was asked for, on its command line."""

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
    nproc: int | str | None = None
    """Ranks of a node, or `auto`; None: as the recipe's launcher says."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides the recipe's."""
    nnodes: int = 1
    min_nodes: int | None = None
    rdzv: str | None = None
    json_events: bool = False
    traceback: bool = False


@dataclass(frozen=True)
class Where:
    """Where a run starts: in which folder, and from which checkpoint, found or chosen."""

    folder: RunFolder | None
    """None: a new one, which titan will name."""
    new: bool
    """Whether the run folder does not exist yet."""
    seen: tuple[int, int] | None
    """The result of `history` before anything was decided."""
    required: bool = False
    """Whether the run refuses to start over at step 0 after steps that were not saved."""
    checkpoint: Path | None = None
    """None until it is chosen, and at step 0. A dry run may have found it in a store, with its run."""
    from_scratch: bool = False
    """Whether existing checkpoints are set aside, and the run starts at step 0."""
    notes: tuple[str, ...] = ()
    """Messages for the user, one line each."""


def history(folder: RunFolder) -> tuple[int, int]:
    """Return the number of attempts of a folder, and the serial of its newest checkpoint."""
    return len(folder.record().get("attempts") or ()), last_serial(folder.checkpoints)


def find_run(request: Request) -> Where:
    """Find the run folder to resume, or choose the one of a new run.

    A run that exists only in a store is downloaded, with its newest good checkpoint, except in a dry run.

    Raises:
        TitanError: there is no such run, the folder is in the way, or the store does not answer.
    """
    run_dir = request.run_dir.absolute() if request.run_dir is not None else None
    if run_dir is None:
        if request.resume:
            return _resumed(RunFolder.open(_run_to_resume(request)), required=True)
        _refuse_step(request, run_dir)
        return Where(None, new=True, seen=None)
    if RunFolder.is_run(run_dir):
        if not request.resume:
            again = f"{request.command} {request.reference} --run-dir {request.run_dir} --resume"
            raise EnvironmentProblem(
                f"the run folder {run_dir} already exists", hint=f"to resume it: {again}"
            )
        return _resumed(RunFolder.open(run_dir), required=request.step is not None)
    if request.resume and (stored := _from_store(request, run_dir)) is not None:
        return stored
    _refuse_step(request, run_dir)
    return _new(RunFolder.choose("", run_dir))


def _resumed(folder: RunFolder, *, required: bool, notes: tuple[str, ...] = ()) -> Where:
    return Where(folder, new=False, seen=history(folder), required=required, notes=notes)


def _new(folder: RunFolder, in_store: Path | None = None, notes: tuple[str, ...] = ()) -> Where:
    return Where(folder, new=True, seen=history(folder), checkpoint=in_store, notes=notes)


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


def _from_store(request: Request, run_dir: Path) -> Where | None:
    """Find a run that is not on this machine, if its checkpoints are in an object store."""
    from titancli.recipe import load_recipe

    section = load_recipe(request.reference, request.overrides, unset=request.unset).recipe.checkpoint
    if section.remote is None:
        return None
    folder, notes = RunFolder(run_dir), list[str]()
    if request.dry_run:
        found = remote.newest(
            folder, section, verify=section.verify, rejected=notes.append, say=request.say, dry_run=True
        )
        if found is not None:
            return _new(RunFolder.choose("", run_dir), found, tuple(notes))
    elif remote.take_run(run_dir, section, rejected=notes.append, say=request.say):
        return _resumed(RunFolder.open(run_dir), required=True, notes=tuple(notes))
    remote.refuse_unusable(run_dir, notes, section)
    return None


def _refuse_step(request: Request, run_dir: Path | None) -> None:
    """
    Raises:
        TitanError: a step of a run was asked for, and there is no run.
    """
    if request.step is None:
        return
    if not request.resume:
        raise UsageError("--step selects the checkpoint to resume from", hint="add --resume")
    raise EnvironmentProblem(f"run {run_dir} does not exist, so step {request.step} cannot be loaded")
