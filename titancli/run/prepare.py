"""Decide what `titan train` will do: which folder, which recipe, from which checkpoint. Torch-free. Every
error that can be known in advance is reported here, before a process is started or a file is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from titancli.checkpoint.format.manifest import last_serial
from titancli.closing import has_ended, uploads_alone
from titancli.data.hub import Hosted
from titancli.errors import EnvironmentProblem
from titancli.process import refusal_below
from titancli.run.drift import Change, changes, sections
from titancli.run.inputs import require_inputs, tokenizer_folder
from titancli.run.request import Request, Where, find_run
from titancli.run.resume import choose_checkpoint, step_of
from titancli.runs import RunFolder
from titancli.worker import remote

if TYPE_CHECKING:
    from titancli.recipe import Loaded
    from titancli.recipe.schema import Recipe


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    request: Request
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
    from_scratch: bool = False
    """Whether the run starts at step 0 and sets its remaining, unusable checkpoints aside."""
    missing: list[str] = field(default_factory=list)
    """Files that the recipe names and that do not exist (dry runs only), one line each."""
    before: Loaded | None = None
    """The recipe of the run to be resumed, as it was; None for a new run."""
    seen: tuple[int, int] | None = None
    """The result of `titancli.run.request.history` before anything was decided; None for a folder that titan
    names."""

    @property
    def finished(self) -> bool:
        """Return whether there is nothing left to do; of epochs, whose rows are not counted yet, False."""
        return self.last_step_done and has_ended(self.folder.last_loaded(), self.start_step)

    @property
    def only_uploads(self) -> bool:
        """Return whether uploads are all that is left, which need no ranks."""
        attempts = self.folder.record().get("attempts") or [{}]
        return self.last_step_done and not self.drift and uploads_alone(attempts[-1], self.start_step)

    @property
    def last_step_done(self) -> bool:
        """Return whether there is no step left to do; of epochs False."""
        return 0 < self.loaded.recipe.training.steps <= self.start_step


def make_plan(request: Request) -> Plan:
    """Decide what to run: in which folder, under which recipe, from which checkpoint.

    Raises:
        TitanError: the recipe is wrong, a folder or a checkpoint is missing or in the way, or the recipe does
            not match the run to continue.
    """
    where = find_run(request)
    loaded, before = _load(request, where)
    where = choose_checkpoint(request, where, loaded.recipe)
    return _complete(request, where, loaded, before)


def _load(request: Request, where: Where) -> tuple[Loaded, Loaded | None]:
    """Load the recipe, with its repositories pinned, and that of the run to be resumed.

    Raises:
        TitanError: it is wrong, or does not go with the run.
    """
    from titancli.recipe import load_recipe

    if where.folder is None or where.new:
        loaded = load_recipe(request.reference, request.overrides, unset=request.unset)
        if pins := _pins(request, loaded.recipe):
            loaded = load_recipe(request.reference, [*request.overrides, *pins], unset=request.unset)
        return loaded, None
    run = where.folder.path
    reference = run if request.run_dir is None else request.reference
    loaded = load_recipe(reference, request.overrides, unset=request.unset, run=run)
    before = load_recipe(run)
    if pins := _pins(request, loaded.recipe, before.recipe):
        overrides = [*request.overrides, *pins]
        loaded = load_recipe(reference, overrides, unset=request.unset, run=run)
    refused = [change for change in changes(before.data, loaded.data) if change.guarded]
    if refused and not request.allow_drift:
        listed = "\n".join(f"  {change}" for change in refused)
        raise EnvironmentProblem(
            f"{run} was started with a different {' and '.join(sections(refused))}:\n{listed}",
            hint="start a new run, or resume anyway with --allow-drift",
        )
    return loaded, before


def _complete(request: Request, where: Where, loaded: Loaded, before: Loaded | None) -> Plan:
    """Return the plan, once what the run reads is there, and its store can be written.

    Raises:
        TitanError: something is missing.
    """
    from titancli.recipe import lock_text

    section, seen = loaded.recipe.checkpoint, where.seen
    folder = where.folder or RunFolder.choose(loaded.recipe.name)
    if seen is not None and section.remote is not None:  # a checkpoint may have been downloaded
        seen = (seen[0], last_serial(folder.checkpoints))
    if where.new and (refused := refusal_below(folder.path)):
        raise EnvironmentProblem(
            f"cannot create the run folder {folder.path}: {refused[1].strerror} ({refused[0]})",
            hint="use another --run-dir, or set TITAN_RUNS to a writable folder",
        ) from refused[1]
    if section.remote is not None:
        from titancli.checkpoint.remote.transfer import require_store

        require_store(section.remote, section.store)
    if not request.dry_run:
        remote.require_uploadable(folder, section, new=not request.resume)
    missing = require_inputs(loaded, where.checkpoint, dry_run=request.dry_run, say=request.say)
    return Plan(
        request,
        folder=folder,
        loaded=loaded,
        lock_text=lock_text(loaded),
        new=where.new,
        named_by_titan=where.folder is None,
        checkpoint=where.checkpoint,
        start_step=0 if where.checkpoint is None else step_of(where.checkpoint),
        drift=[] if before is None else changes(before.data, loaded.data),
        notes=list(where.notes),
        from_scratch=where.from_scratch,
        missing=missing,
        before=before,
        seen=seen,
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
