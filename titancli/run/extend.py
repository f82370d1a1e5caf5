"""Ways to continue a run beyond its end, and what each does to the learning rate. Torch-free, except that the
rows of `training.epochs` are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titancli.checkpoint import read_manifest
from titancli.checkpoint.format.manifest import newest_good
from titancli.errors import EnvironmentProblem, UsageError
from titancli.layout.degrees import Degrees
from titancli.optimizers import WarmupStableDecay
from titancli.recipe import load_recipe
from titancli.run.effects import Course, course_of, rate_text
from titancli.runs import RunFolder

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

SAMPLES = 1000
"""Steps at which the peak of a schedule is looked for."""


@dataclass(frozen=True)
class Way:
    """A way to continue a run."""

    name: str
    """stretch, hold, warm_up or decay."""
    about: str
    """What the learning rate does."""
    overrides: tuple[str, ...]
    unset: tuple[str, ...]
    rates: dict[int, float]
    """The learning rate at some steps, counted from 1."""


@dataclass(frozen=True)
class Extension:
    """A run's schedule so far, and the ways to continue it."""

    done: int
    """Steps that are done and saved."""
    before: int
    """Steps of the run so far."""
    steps: int
    """Steps of the longer run."""
    rates: dict[int, float]
    """The learning rate so far, at some steps."""
    ways: list[Way]


def extension(folder: RunFolder, *, steps: int | None = None, epochs: float | None = None) -> Extension:
    """Return the ways to continue a run to a number of steps, or of epochs.

    Raises:
        UsageError: the run has come that far already, its length has another unit, or its learning rate is
            not known.
        EnvironmentProblem: it has no checkpoint.
    """
    recipe = load_recipe(folder.path).recipe
    length = _length(recipe, steps, epochs)
    checkpoint = newest_good(folder.checkpoints, verify="size")
    if checkpoint is None:
        raise EnvironmentProblem(f"{folder.path} has no good checkpoint to continue from")
    done, degrees = read_manifest(checkpoint).step, Degrees(**(folder.last_loaded().get("mesh") or {}))
    so_far = course_of(recipe, degrees, checkpoint)
    if not done or (last := so_far.rate(done)) is None:
        raise UsageError(
            f"the learning rate of {folder.path} is not known: its optimizer has no lr, or the rows of "
            "training.epochs cannot be counted",
            hint="`titan recipe show RUN` prints its schedule",
        )
    unset = () if recipe.lr_scheduler.total_steps is None else ("lr_scheduler.total_steps",)
    ways: list[Way] = []
    longest = 0
    for name, about, overrides in _ways(recipe, done, last, length):
        course = course_of(load_recipe(folder.path, overrides, unset=unset).recipe, degrees, checkpoint)
        longest = course.recipe.training.steps
        if longest <= done:
            raise UsageError(f"{length} is no more than the {done:,} steps that the run has done")
        ways.append(Way(name, about, overrides, unset, _rates(course, done + 1, longest)))
    return Extension(done, so_far.recipe.training.steps, longest, _rates(so_far, 1, done), ways)


def _length(recipe: Recipe, steps: int | None, epochs: float | None) -> str:
    """Return the override of a run's length."""
    unit = "steps" if recipe.training.epochs is None else "epochs"
    if (steps if unit == "steps" else epochs) is None or (steps is not None and epochs is not None):
        raise UsageError(
            f"the length of this run is given in {unit}", hint=f"give --{unit}, and nothing else"
        )
    return f"training.steps={steps}" if unit == "steps" else f"training.epochs={epochs:g}"


def _ways(recipe: Recipe, done: int, last: float, length: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield name, description and overrides of each way; constant and decreasing rates only from one above
    0."""
    yield "stretch", "the same schedule, over all steps", (length,)
    wsd = () if isinstance(recipe.lr_scheduler, WarmupStableDecay) else ("lr_scheduler=wsd",)
    begin = (length, *wsd, f"lr_scheduler.start_step={done}")
    flat = (f"optimizer.lr={last:.6g}", "lr_scheduler.warmup_steps=0")
    if last > 0:
        about = f"constant at {rate_text(last)}, the rate of step {done:,}"
        yield "hold", about, (*begin, *flat, "lr_scheduler.decay_ratio=0")
    yield "warm_up", "the same schedule once more, over the new steps", begin
    if last > 0:
        yield "decay", f"from {rate_text(last)} down", (*begin, *flat, "lr_scheduler.decay_ratio=1")


def _rates(course: Course, first: int, last: int) -> dict[int, float]:
    """Return the learning rate at the first step, the peak, the middle and the last step."""
    sampled = sorted({*range(first, last, max(1, (last - first) // SAMPLES)), last})
    rates = {step: rate for step in sampled if (rate := course.rate(step)) is not None}
    peak = max(rates, key=lambda step: rates[step])
    middle = min(rates, key=lambda step: abs(2 * step - first - last))
    return {step: rates[step] for step in sorted({first, peak, middle, last})}
