"""The learning rate over a run: the schedule `wsd`, and any recipe's schedule, checked. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from titancli.errors import PluginError, RecipeError
from titancli.registry import current
from titancli.registry.component import build as build_component

if TYPE_CHECKING:
    from titancli.optimizers import WarmupStableDecay
    from titancli.protocols import Schedule
    from titancli.recipe.schema import Recipe

SAMPLES = 1000
"""Steps at which a schedule is checked before the run starts."""


def build(config: WarmupStableDecay, *, steps: int) -> Schedule:
    """Build a schedule of warm-up, stable phase and decay, that begins at `config.start_step`.

    Neither the first nor the last step has a factor of zero: decay would end one step after the last.
    """
    warmup, decay = config.phases(steps)
    begin = config.start_step

    def factor(step: int) -> float:
        step = max(step, begin)
        if step < begin + warmup:
            return (step - begin + 1) / warmup
        if step < steps - decay or not decay:
            return 1.0
        progress = min(1.0, (step - (steps - decay)) / decay)
        if config.decay_type == "linear":
            left = 1.0 - progress
        elif config.decay_type == "sqrt":
            left = 1.0 - math.sqrt(progress)
        else:
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.min_lr_factor + (1.0 - config.min_lr_factor) * left

    return factor


def schedule_of(recipe: Recipe) -> Callable[[int], float]:
    """Build a recipe's schedule and check it at the first, the last and up to 1,000 further steps of the run.

    Returns:
        The factor on the learning rate as a function of the step, counted from 0. It raises PluginError at a
            step where the schedule gives no valid factor, and RecipeError if the length is in epochs, whose
            steps nobody has counted.

    Raises:
        PluginError: the schedule cannot be built, or gives an invalid factor.
    """
    config = recipe.lr_scheduler
    if not recipe.schedule_steps:
        return _unknown
    name = f"the schedule {current().full_name(type(config))}"
    try:
        schedule = build_component(config, steps=recipe.schedule_steps)
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"{name} cannot be built: {type(error).__name__}: {error}") from error
    if not callable(schedule):
        raise PluginError(
            f"{name} built a {type(schedule).__name__}, which cannot be called",
            hint="its target returns a function from a step to a factor",
        )

    def factor(step: int) -> float:
        try:
            value = schedule(step)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise PluginError(f"{name} raised an error at step {step}: {why}") from error
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise PluginError(
                f"{name} gave {value!r} at step {step}",
                hint="the factor on the learning rate is a finite int or float of at least 0",
            )
        return value

    steps = recipe.training.steps or recipe.schedule_steps
    for step in (*range(0, steps, -(-steps // SAMPLES)), steps - 1):
        factor(step)
    return factor


def _unknown(step: int) -> float:
    raise RecipeError(
        "the length of the schedule is not known: only a run counts the steps of training.epochs",
        hint="set training.steps or lr_scheduler.total_steps; a script can call optim_step(lr=...)",
    )
