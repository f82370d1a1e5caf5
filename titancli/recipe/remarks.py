"""What a user should know of a recipe that is not wrong: a line each, said before a run and by `validate`."""

from __future__ import annotations

from collections.abc import Iterator

from titancli.recipe.schema import Recipe
from titancli.registry.component import component_info


def remarks(recipe: Recipe) -> list[str]:
    """Sentences, none of which ends a command."""
    return [*_schedule(recipe), *_rounding(recipe)]


def _schedule(recipe: Recipe) -> Iterator[str]:
    section = recipe.lr_scheduler
    of = "training.steps" if section.total_steps is None else "lr_scheduler.total_steps"
    total, warmup, decay = section.phases(recipe.training.steps)
    if warmup < section.warmup_steps:
        yield (
            f"the warm-up is shortened from {section.warmup_steps} steps to {warmup}, all of {of}: "
            "the learning rate rises until the last step"
        )
    if section.decay_ratio is not None and decay < (asked := round(total * section.decay_ratio)):
        yield (
            f"the decay is shortened from {asked} steps to {decay}: "
            f"{of} = {total}, and the warm-up takes {warmup} of them"
        )


def _rounding(recipe: Recipe) -> Iterator[str]:
    if recipe.training.dtype == "bfloat16" and not getattr(recipe.optimizer, "rounds_stochastically", False):
        name = component_info(recipe.optimizer).name
        yield (
            f'training.dtype is "bfloat16", and the optimizer {name} does not say that it rounds '
            "stochastically: to nearest, a change below 0.2 % of a weight is lost; adamw does, and float32 "
            "needs none"
        )
