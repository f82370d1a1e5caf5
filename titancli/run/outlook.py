"""Describe in a few lines what a run will do, before torch is imported. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titancli.checkpoint.start_from import start_from
from titancli.recipe.find import url_of
from titancli.recipe.schema import Recipe
from titancli.registry.component import component_info
from titancli.run.fit import check_world
from titancli.run.prepare import Plan


def outlook(plan: Plan, world: int) -> Iterator[str]:
    """Yield where weights come from, the amount of data of a step and of the run, and what is evaluated and
    saved.

    Raises:
        RecipeError: the recipe does not fit the ranks.
    """
    recipe = plan.loaded.recipe
    degrees, accumulation = check_world(plan.loaded, world)
    rows = recipe.training.local_batch_size * accumulation * degrees.dp
    name = component_info(recipe.model).name
    yield f"model:     {name}, {_weights(recipe, plan.checkpoint)}"
    left, epochs = recipe.training.steps - plan.start_step, recipe.training.epochs
    if recipe.dataset is not None:
        tokens = rows * recipe.training.seq_len
        length = f"{tokens * left:,} in {left:,} step" if epochs is None else f"{epochs:g} epoch"
        length += "s" * ((left if epochs is None else epochs) != 1)
        yield f"data:      {component_info(recipe.dataset).name}, {tokens:,} tokens per step, {length}"
    yield f"saves:     {_saves(recipe)}{_evaluates(recipe)}"


def _weights(recipe: Recipe, checkpoint: Path | None) -> str:
    start = start_from(recipe, checkpoint)
    if start.source is None:
        return "random weights"
    return (
        f"{'continued' if start.kind == 'state' else 'weights'} from {url_of(start.source) or start.source}"
    )


def _saves(recipe: Recipe) -> str:
    section = recipe.checkpoint
    if not section.enable:
        return "nothing"
    kept = f", the last {section.keep_latest_k} are kept" if section.keep_latest_k else ""
    copies = "" if section.copies is None else f"; copies in memory every {section.copies.interval:,}"
    return f"every {section.interval:,} steps and at the end{kept}{copies}"


def _evaluates(recipe: Recipe) -> str:
    section, loop = recipe.validation, recipe.loop
    found = [f"{' and '.join(section.datasets)} every {section.freq:,}"] if section.datasets else []
    if loop.eval_task is not None and loop.eval_freq:
        found.append(f"{component_info(loop.eval_task).name} every {loop.eval_freq:,}")
    return f"; evaluates {' and '.join(found)}" if found else ""
