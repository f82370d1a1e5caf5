"""One run on one rank: everything a recipe names is built, the loop is run, and its outcome returned."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titancli.checkpoint import Checkpointer
from titancli.checkpoint.start_from import start_from
from titancli.data.loader import Loader
from titancli.engine import Engine
from titancli.errors import EnvironmentProblem, TitanError
from titancli.loops.run import Run, Stop
from titancli.registry.component import build
from titancli.registry.defaults import ModelConfigDefaults, with_defaults
from titancli.rl.prompts import PromptSource
from titancli.run.exports import export

if TYPE_CHECKING:
    from titancli.checkpoint.remote.uploads import Uploads
    from titancli.observe.observers import Observers
    from titancli.protocols import Dataset
    from titancli.recipe.schema import Recipe

Source = Loader | PromptSource

logger = logging.getLogger(__name__)


def run(
    recipe: Recipe,
    *,
    run_folder: Path,
    lock_text: str,
    run_id: str,
    checkpoint: Path | None,
    observers_for: Callable[[Engine], Observers],
    stop: Stop,
    device: torch.device,
    on_first_step: Callable[[], None] = lambda: None,
    allow_drift: bool = False,
) -> dict[str, Any]:
    """Run a recipe in the process group that is initialised.

    Args:
        checkpoint: to continue from; None starts at step 0.
        observers_for: makes what watches the run, once the engine stands.
        stop: asked before each step.
        on_first_step: called once, after the first step.
        allow_drift: begin the data anew, where they are not those that the checkpoint's position is in.

    Returns:
        `{"why", "signal", "step", "checkpoint"}`; why is finished, stopped, interrupted or data_ended.

    Raises:
        TitanError: something that the recipe names is missing or does not fit.
    """
    tokenizer = None if recipe.tokenizer is None else build(recipe.tokenizer)
    check_vocabulary(recipe, tokenizer)
    if (first := start_from(recipe, checkpoint)).kind == "weights":
        logger.info("loading weights from %s", first.source)
    engine = Engine.build(recipe, device=device, checkpoint=checkpoint)
    data = _data(recipe, tokenizer, engine, checkpoint, allow_drift)
    observers = observers_for(engine)
    this = Run(
        steps=recipe.training.steps,
        stop=stop,
        gc_freq=recipe.training.gc_freq,
        save_or_stop=recipe.checkpoint.on_error == "stop",
        guard=engine.guard,
        on_first_step=on_first_step,
        open_dataset=partial(_dataset, recipe, tokenizer, engine),
        reference=partial(Engine.frozen, recipe, device=device),
        batch_shape=(recipe.training.local_batch_size, recipe.training.seq_len),
        folder=run_folder,
        saved_step=engine.step if checkpoint is not None else None,
    )
    uploads = _uploads(recipe, run_folder, run_id)
    if recipe.checkpoint.enable:
        this.checkpoints = Checkpointer(
            run_folder / "checkpoints",
            recipe.checkpoint,
            lock_text=lock_text,
            run_id=run_id,
            mesh=asdict(engine.mesh.degrees),
            kept=engine.kept,
            on_saved=partial(_saved, this, observers),
            uploads=uploads,
            from_zero=checkpoint is None,
        )
    loop = build(recipe.loop, engine=engine, data=data, tokenizer=tokenizer, observers=observers, run=this)
    if recipe.checkpoint.create_seed_checkpoint:
        loop = partial(this.save_seed, engine, data)
    with closing(data), _garbage_between_steps(), _settled(uploads):
        loop()
        _leave_behind(recipe, engine, this, run_folder)
    checkpoint_name = f"checkpoints/step-{this.saved_step}" if this.saved_step is not None else None
    return {"why": this.why, "signal": this.signal, "step": engine.step, "checkpoint": checkpoint_name}


def _leave_behind(recipe: Recipe, engine: Engine, this: Run, run_folder: Path) -> None:
    """The exports of a run that has come to its end, and its uploads."""
    if this.checkpoints is None:
        return
    ended = this.why in ("finished", "data_ended")
    if ended and engine.step:
        export(recipe.checkpoint, engine, this.checkpoints, run_folder)
    this.checkpoints.finish_uploads(must=ended)


def _saved(this: Run, observers: Observers, step: int, path: Path) -> None:
    this.saved(step)
    observers.checkpoint_saved(step, path)


@contextmanager
def _settled(uploads: Uploads | None) -> Iterator[None]:
    """What was saved is to get to the object store, even where the run fails."""
    try:
        yield
    except TitanError:
        if uploads is not None:
            uploads.settle()
        raise


@contextmanager
def _garbage_between_steps() -> Iterator[None]:
    """What stands now stays; garbage is collected by `Run`, at times that are the same on all ranks.

    What whoever called this has frozen stays frozen: there is no way to thaw the rest alone.
    """
    ours = gc.get_freeze_count() == 0
    gc.collect()
    if ours:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if ours:
            gc.unfreeze()


def _data(
    recipe: Recipe, tokenizer: Any, engine: Engine, checkpoint: Path | None, allow_drift: bool
) -> Source:
    """The data; where there is a checkpoint to go on from, they and the engine are as it holds them."""
    again = partial(_source, recipe, tokenizer, engine)
    data, start = again(), start_from(recipe, checkpoint)
    if start.kind != "state":
        return data
    exclude = start.exclusion
    logger.info("loading %s", start.folder)
    state = engine.load(start.folder, verify=recipe.checkpoint.verify, exclude=exclude)
    if exclude.has("data"):
        return data
    return _goes_on(data, state.get("data"), again if allow_drift else None)


def _source(recipe: Recipe, tokenizer: Any, engine: Engine) -> Source:
    """What the loop takes its data from: the recipe's dataset, or the prompts of the loop's own task."""
    if recipe.dataset is not None:
        return _loader(recipe, tokenizer, engine)
    task = build(recipe.loop.task, seed=recipe.training.seed)
    return PromptSource(task, tokenizer, longest=recipe.training.seq_len)


def _uploads(recipe: Recipe, run_folder: Path, run_id: str) -> Uploads | None:
    """Rank 0's, where the recipe has an object store for checkpoints."""
    section = recipe.checkpoint
    if section.remote is None or dist.get_rank() != 0:
        return None
    from titancli.checkpoint.remote.transfer import run_place
    from titancli.checkpoint.remote.uploads import Uploads

    place = run_place(section.remote, run_folder)
    return Uploads(run_folder / "checkpoints", place, run_id, section.keep_latest_k)


def _goes_on(data: Source, state: Any, again: Callable[[], Source] | None) -> Source:
    """The data, at the place that a checkpoint holds; or what `again` makes, where they are others.

    Raises:
        TitanError: they are, and there is no `again`; or it holds no place.
    """
    if not isinstance(state, dict):
        raise EnvironmentProblem(
            "the checkpoint has no position in the data",
            hint='checkpoint.exclude_from_loading=["data"] starts the data from the beginning',
        )
    try:
        data.load_state(state)
    except TitanError as error:
        if again is None:
            raise
        logger.warning("the data starts from the beginning: %s", error.message)
        return again()
    return data


def check_vocabulary(recipe: Recipe, tokenizer: Any) -> None:
    """Refuse a tokenizer whose ids the model has no embedding for.

    Raises:
        EnvironmentProblem: it has more ids than the model's `vocab_size`.
    """
    rows = with_defaults(ModelConfigDefaults, recipe.model).vocab_size
    if rows is not None and tokenizer is not None and tokenizer.vocab_size > rows:
        raise EnvironmentProblem(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but the model's vocab_size is only {rows:,}",
            hint=f"use the model's own tokenizer, or set model.vocab_size={tokenizer.vocab_size}",
        )


def _loader(recipe: Recipe, tokenizer: Any, engine: Engine) -> Loader:
    return Loader(
        _dataset(recipe, tokenizer, engine, recipe.dataset),
        device=engine.device,
        vocab_size=with_defaults(ModelConfigDefaults, recipe.model).vocab_size,
    )


def _dataset(recipe: Recipe, tokenizer: Any, engine: Engine, config: Any) -> Dataset:
    return build(
        config,
        tokenizer=tokenizer,
        seq_len=recipe.training.seq_len,
        rows=recipe.training.local_batch_size,
        dp_rank=engine.mesh.dp_rank,
        dp_size=engine.mesh.degrees.dp,
        seed=recipe.training.seed,
    )
