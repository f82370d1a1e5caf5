"""Open the data of a run: the recipe's dataset, or the prompts of its task, at the position of a
checkpoint."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from titancli.checkpoint.start_from import start_from
from titancli.data.loader import Loader
from titancli.data.workers import Rebuild, Workers
from titancli.distributed.process_group import patient_group
from titancli.distributed.together import Ranks
from titancli.engine.turn_ends import stop_at_turns
from titancli.errors import EnvironmentProblem, TitanError
from titancli.loops.validation import Validation
from titancli.losses.cross_entropy import CrossEntropy
from titancli.observe.metrics import collector
from titancli.recipe.vocabulary import GROW
from titancli.registry.component import build
from titancli.rl.prompts import PromptSource

if TYPE_CHECKING:
    from titancli.engine import Engine
    from titancli.observe.observers import Observers
    from titancli.protocols import Dataset
    from titancli.recipe.schema import Recipe

Source = Loader | PromptSource

logger = logging.getLogger(__name__)


def check_vocabulary(recipe: Recipe, tokenizer: Any) -> None:
    """Check that the model has an embedding for each id of the tokenizer.

    Raises:
        EnvironmentProblem: the tokenizer has more ids than the model's `vocab_size`.
    """
    rows = recipe.model.vocab_size
    if rows is not None and tokenizer is not None and tokenizer.vocab_size > rows:
        grow = "" if recipe.weights is None else f"weights_vocab={GROW} "
        raise EnvironmentProblem(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but the model's vocab_size is only {rows:,}",
            hint=f"use the model's own tokenizer, or set {grow}model.vocab_size={tokenizer.vocab_size}",
        )


def open_data(
    recipe: Recipe, tokenizer: Any, engine: Engine, checkpoint: Path | None, *, allow_drift: bool
) -> Source | None:
    """Open the loop's data source; None for a loop that does not train.

    If there is a checkpoint to continue from, load it: into the engine, and its position into the data.

    Args:
        allow_drift: start the data from the beginning if they are not those of the checkpoint.

    Raises:
        TitanError: the checkpoint has no position in the data, or one in other data.
    """
    loop = recipe.loop
    if not loop.trains:
        if loop.checkpoint is not None:
            engine.load(loop.checkpoint, optimizer=False, verify=recipe.checkpoint.verify)
        return None
    again = partial(_source, recipe, tokenizer, engine)
    data, start = again(), start_from(recipe, checkpoint)
    if start.kind != "state":
        return data
    exclude = Ranks(patient_group()).call(f"reading {start.folder}", lambda: start.exclusion)
    logger.info("loading %s", start.folder)
    state = engine.load(start.folder, verify=recipe.checkpoint.verify, exclude=exclude)
    if exclude.has("data"):
        return data
    return _continued(data, state.get("data"), again if allow_drift else None)


def epochs(recipe: Recipe, data: Source | None, engine: Engine) -> str | None:
    """Return how many times the run passes over its data, in words; None if their size is not known."""
    training = recipe.training
    if training.epochs is not None and data is not None:
        words = f"{training.epochs:g} epoch{'s' * (training.epochs != 1)} in {training.steps:,} step"
        return words + "s" * (training.steps != 1)
    dataset = getattr(data, "dataset", None)
    unit = "tokens" if hasattr(dataset, "epoch_tokens") else "rows"
    size_of_epoch = getattr(dataset, f"epoch_{unit}", None)
    if size_of_epoch is None:
        return None
    try:
        with collector.muted():
            found = size_of_epoch()
    except TitanError:  # only one rank runs this; the first batch raises the error on every rank
        return None
    if found is None:
        return None
    amount, counted = found
    rows = training.local_batch_size * engine.settings.accumulation * engine.mesh.degrees.dp
    size_of_step = rows * (training.seq_len if unit == "tokens" else 1)
    # Steps before a resume may have been of another size.
    done = 0 if data is None or not engine.step else _consumed(data.state, unit, training.seq_len)
    total = (engine.step * size_of_step if done is None else done) + (
        training.steps - engine.step
    ) * size_of_step
    size = f"{amount:,}" if counted else f"about {float(f'{amount:.2g}'):,.0f}"
    return f"{total / max(amount, 1):.2g} epochs of {size} {unit}"


def _consumed(state: Mapping[str, Any], unit: str, seq_len: int) -> int | None:
    """Return the tokens or rows that a position in the data counts; None if it counts none."""
    counted = state.get(unit)
    if counted is None and unit == "tokens" and "row" in state:
        counted = state["row"] * seq_len
    return counted if isinstance(counted, int) else None


def open_validation(
    recipe: Recipe, tokenizer: Any, engine: Engine, observers: Observers
) -> Validation | None:
    """Build the validation that runs between steps; None without `[validation.datasets]`.

    The loss is the recipe's, or cross-entropy if that one needs samples and their advantages.
    """
    section = recipe.validation
    if not section.datasets:
        return None
    datasets = {}
    for name, config in section.datasets.items():
        try:
            datasets[name] = open_dataset(recipe, tokenizer, engine, config, rows=section.local_batch_size)
        except TitanError as error:
            raise type(error)(f"validation.datasets.{name}: {error.message}", hint=error.hint) from error
    of_samples = recipe.loss.learns_from_samples
    return Validation(section, datasets, engine, observers, loss=CrossEntropy() if of_samples else None)


def open_dataset(
    recipe: Recipe, tokenizer: Any, engine: Engine, config: Any, *, rows: int | None = None
) -> Dataset:
    """Build a dataset for this data-parallel rank, with `rows` rows in a batch; None: as many as in the
    recipe."""
    dataset: Dataset = build(
        config,
        tokenizer=tokenizer,
        seq_len=recipe.training.seq_len,
        rows=rows or recipe.training.local_batch_size,
        dp_rank=engine.mesh.dp_rank,
        dp_size=engine.mesh.degrees.dp,
        seed=recipe.training.seed,
    )
    if config is recipe.dataset and recipe.training.epochs is not None:
        dataset.end_after(math.ceil(recipe.training.epochs))
    return dataset


def identity_of(position: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the identity of the data from a position; None if the dataset does not give it."""
    found = position.get("data")
    return dict(found) if isinstance(found, Mapping) else None


def digest_of(identity: Mapping[str, Any] | None) -> str | None:
    """Return a digest of an identity (files, revision, tokenizer, order); None without an identity."""
    if identity is None:
        return None
    return xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())


def read_identity(recipe: Recipe) -> dict[str, Any] | None:
    """Return `identity_of` the data that a run of a recipe would begin with, without an engine.

    Raises:
        TitanError: the data cannot be read.
    """
    if recipe.dataset is None:
        tokenizer = None if recipe.tokenizer is None else build(recipe.tokenizer)
        task = build(recipe.loop.task, seed=recipe.training.seed)
        return identity_of(PromptSource(task, tokenizer, longest=recipe.training.seq_len).state)
    return read_dataset(recipe, recipe.dataset)


def read_dataset(recipe: Recipe, config: Any) -> dict[str, Any] | None:
    """Return the identity of one dataset of the recipe."""
    tokenizer = None if recipe.tokenizer is None else build(recipe.tokenizer)
    dataset = build(
        config,
        tokenizer=tokenizer,
        seq_len=recipe.training.seq_len,
        rows=recipe.training.local_batch_size,
        dp_rank=0,
        dp_size=1,
        seed=recipe.training.seed,
    )
    return identity_of(dataset.state_dict())


def _source(recipe: Recipe, tokenizer: Any, engine: Engine) -> Source:
    if recipe.dataset is not None:
        training = recipe.training
        dataset = open_dataset(recipe, tokenizer, engine, recipe.dataset)
        rows_per_step = training.local_batch_size * engine.settings.accumulation * engine.mesh.degrees.dp
        if hasattr(dataset, "rows_per_step"):
            dataset.rows_per_step = rows_per_step
        workers, count, depth = None, training.dataloader.num_workers, training.dataloader.prefetch_factor
        if count:
            rebuild = Rebuild(
                recipe.dataset,
                recipe.tokenizer,
                seq_len=training.seq_len,
                rows=training.local_batch_size,
                dp_rank=engine.mesh.dp_rank,
                dp_size=engine.mesh.degrees.dp,
                seed=training.seed,
                rows_per_step=rows_per_step,
                epochs=None if training.epochs is None else math.ceil(training.epochs),
            )
            workers = Workers(rebuild, dataset, count=count, depth=depth)
        return Loader(
            dataset,
            device=engine.device,
            prefetch=depth,
            vocab_size=recipe.model.vocab_size,
            rows=1 if recipe.dataset.joins_rows else training.local_batch_size,
            workers=workers,
        )
    task = build(recipe.loop.task, seed=recipe.training.seed)
    prompts = PromptSource(task, tokenizer, longest=recipe.training.seq_len)
    if prompts.are_messages:
        stop_at_turns(engine)
    return prompts


def _continued(data: Source, state: Any, again: Callable[[], Source] | None) -> Source:
    """Return the data at the position of a checkpoint; if the position is in other data, the result of
    `again`."""
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
