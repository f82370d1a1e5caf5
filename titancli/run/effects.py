"""Say in numbers what a resume changes: the learning rate, the size of a step and the length of the run.

Torch-free, except that the rows of `training.epochs` are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from titancli.errors import TitanError
from titancli.layout.degrees import Degrees
from titancli.optimizers.schedule import schedule_of
from titancli.run.fit import check_world

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe
    from titancli.run.prepare import Plan


@dataclass(frozen=True)
class Course:
    """How a recipe goes on, on some layout."""

    recipe: Recipe
    """With `training.steps`, also where it has epochs; 0 steps: their rows cannot be counted."""
    rows: int
    """Rows of a step."""

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.rows * self.recipe.training.seq_len

    def rate(self, step: int) -> float | None:
        """Return the learning rate of a step, counted from 1; None for an optimizer without a single rate,
        and before the steps are counted."""
        rate = getattr(self.recipe.optimizer, "lr", None)
        if not isinstance(rate, float | int) or not self.recipe.schedule_steps:
            return None
        return rate * self._factor(step - 1)

    @cached_property
    def _factor(self) -> Callable[[int], float]:
        return schedule_of(self.recipe)

    def left(self, done: int) -> int:
        """Return the number of steps after `done` steps."""
        return max(0, self.recipe.training.steps - done)


def course_of(
    recipe: Recipe, degrees: Degrees, checkpoint: Path | None = None, *, allow_drift: bool = False
) -> Course:
    """Return the course of a recipe that continues from a checkpoint; the rows of epochs are counted."""
    training = recipe.training
    rows = training.local_batch_size * recipe.accumulation(degrees) * degrees.dp
    if training.epochs is not None and not training.steps:
        from titancli.worker.epochs import steps_of

        try:
            steps = steps_of(recipe, degrees.world, checkpoint, allow_drift=allow_drift)
        except TitanError:  # the ranks will say why they cannot be counted
            steps = 0
        recipe = replace(recipe, training=replace(training, steps=steps))
    return Course(recipe, rows)


def effects(plan: Plan, world: int) -> Iterator[str]:
    """Yield a line for each quantity that a resume changes, and for the learning rate if the recipe changed.

    Raises:
        RecipeError: the recipe does not fit the ranks.
    """
    if plan.before is None:
        return
    here = check_world(plan.loaded, world)[0]
    mesh = plan.folder.last_loaded().get("mesh")
    there = Degrees(**mesh) if mesh else here
    if not plan.drift and there == here:
        return
    now = course_of(plan.loaded.recipe, here, plan.checkpoint, allow_drift=plan.request.allow_drift)
    try:
        was = course_of(plan.before.recipe, there, plan.checkpoint)
    except TitanError:  # the run has not begun on these ranks, which its recipe does not fit
        was = course_of(plan.before.recipe, here, plan.checkpoint)
    if was.rows != now.rows:
        follows = now.recipe.training.global_batch_size is None and there.dp != here.dp
        why = " (training.global_batch_size is not set, so it follows from the number of ranks)"
        yield f"rows of a step: {was.rows} -> {now.rows}{why * follows}"
    if was.tokens != now.tokens:
        yield f"tokens of a step: {was.tokens:,} -> {now.tokens:,}"
    done = plan.start_step
    before, after = was.left(done), now.left(done)
    if (before, before * was.tokens) != (after, after * now.tokens):
        tokens = f"{before * was.tokens:,} -> {after * now.tokens:,} tokens"
        yield f"steps to come: {before:,} -> {after:,} ({tokens})"
    if plan.drift and after:
        yield from _rates(was, now, done)


def _rates(was: Course, now: Course, done: int) -> Iterator[str]:
    try:
        before, after = was.rate(done + 1), now.rate(done + 1)
        last = was.rate(done) if done else None
    except TitanError:  # of a schedule: reported when it is built
        return
    if after is None:
        return
    old = "unknown" if before is None else rate_text(before)
    had = "" if last is None else f"; step {done} had {rate_text(last)}"
    same = before == after
    yield f"learning rate at step {done + 1}: {'' if same else f'{old} -> '}{rate_text(after)}" + (
        f", as before{had}" if same else had
    )


def rate_text(rate: float) -> str:
    """Return a learning rate in the form of the status line: `3.00e-04`."""
    return f"{rate:.2e}"
