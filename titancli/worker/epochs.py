"""How many steps the epochs of a recipe take: its rows are counted before the first step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.checkpoint.format.manifest import read_manifest
from titancli.checkpoint.start_from import start_from
from titancli.distributed.process_group import patient_group
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem, RecipeError, TitanError
from titancli.observe.metrics import collector
from titancli.registry.component import build, component_info

if TYPE_CHECKING:
    from titancli.protocols import Dataset
    from titancli.recipe.schema import Recipe
    from titancli.worker.run_context import RunContext


def with_steps(context: RunContext) -> RunContext:
    """Return the context with `training.steps` set to what `training.epochs` takes, if the recipe has that.
    One rank of each machine counts. Collective.

    Raises:
        TitanError: the rows cannot be counted, or ranks count different ones.
    """
    recipe, place = context.recipe, context.place
    if recipe.training.epochs is None or recipe.dataset is None:
        return context
    drift = context.attempt.get("allow_drift", False)

    def count() -> int | None:
        if place.rank and place.local_rank:
            return None
        return steps_of(recipe, place.world, context.checkpoint, allow_drift=drift)

    found = Ranks(patient_group()).allgather_call("counting the rows of an epoch", count)
    counted = {rank: steps for rank, steps in enumerate(found) if steps is not None}
    if len(set(counted.values())) > 1:
        listed = ", ".join(f"rank {rank}: {steps}" for rank, steps in counted.items())
        raise EnvironmentProblem(
            f"training.epochs is a different number of steps on different ranks: {listed}",
            hint="give every machine the same data and tokenizer",
        )
    training = replace(recipe.training, steps=counted[0])
    return replace(context, loaded=replace(context.loaded, recipe=replace(recipe, training=training)))


def steps_of(recipe: Recipe, world: int, checkpoint: Path | None = None, *, allow_drift: bool = False) -> int:
    """Return the steps of a recipe in epochs, on this many ranks: those that were done and those left.

    Args:
        checkpoint: of the run, from which it continues.
        allow_drift: the data start from the beginning if they are not those of the checkpoint.

    Raises:
        TitanError: the rows cannot be counted.
    """
    training, degrees = recipe.training, recipe.degrees(world)
    with collector.muted():  # the run itself counts bad rows, and says what rows are
        dataset: Dataset = build(
            recipe.dataset,
            tokenizer=None if recipe.tokenizer is None else build(recipe.tokenizer),
            seq_len=training.seq_len,
            rows=training.local_batch_size,
            dp_rank=0,
            dp_size=1,
            seed=training.seed,
        )
        done = _continue(dataset, recipe, checkpoint, allow_drift=allow_drift)
        left = _rows_left(dataset, recipe)
    rows_per_step = training.local_batch_size * recipe.accumulation(degrees) * degrees.dp
    return done + max(0, -(-left // rows_per_step))


def _continue(dataset: Dataset, recipe: Recipe, checkpoint: Path | None, *, allow_drift: bool) -> int:
    """Move a dataset to the position that a run starts from; return the step."""
    start = start_from(recipe, checkpoint)
    if start.kind != "state":
        return 0
    state, exclude = read_manifest(start.folder).state, start.exclusion
    position: Any = state.get("data")
    if isinstance(position, dict) and not exclude.has("data"):
        try:
            dataset.load_state_dict(position)
        except TitanError:
            if not allow_drift:
                raise
    return 0 if exclude.has("step") else int(state.get("engine", {}).get("step", 0))


def _rows_left(dataset: Dataset, recipe: Recipe) -> int:
    part, whole = math.modf(recipe.training.epochs or 0)
    left = dataset.rows_left(int(whole))
    if left is None:
        name = component_info(recipe.dataset).name
        raise RecipeError(
            f"training.epochs: the dataset {name} does not say how many rows an epoch has",
            hint="set training.steps instead; a plugin's dataset can offer rows_left and end_after",
        )
    if part:
        following = dataset.rows_left(int(whole) + 1)
        left += math.ceil(round(part * ((following or left) - left), 6))
    return left
