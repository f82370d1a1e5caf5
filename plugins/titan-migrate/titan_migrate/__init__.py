"""Convert configs of axolotl, LLaMA-Factory and torchtune to recipes; and the learning rates they have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le

from titancli import Command, component, hookimpl
from titancli.optimizers import ScheduleConfig

if TYPE_CHECKING:
    from titancli import Recipe


@component("schedule", "from_zero", target="titan_migrate.schedule:build")
class FromZero(ScheduleConfig):
    """The schedules of transformers, axolotl and torchtune: a warm-up whose first step has a rate of 0."""

    shape: Literal["linear", "cosine", "constant", "inverse_sqrt"] = "linear"
    """What follows the warm-up: decay to the end of the run, or none, or that with 1 / sqrt(step)."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps of warm-up: step s, counted from 0, has s / warmup_steps of the rate."""
    warmup_ratio: Annotated[float, Ge(0), Le(1)] | None = None
    """Warm-up as a fraction of the steps, in place of `warmup_steps`."""
    warmup_rounding: Literal["up", "down"] = "up"
    """What makes steps of `warmup_ratio`: transformers rounds up; axolotl rounds down, and makes 2 of 1."""
    warmup_limit: Annotated[int, Gt(0)] | None = None
    """Most steps that `warmup_ratio` makes."""
    warmup_power: Literal[1, 2] = 1
    """The warm-up is linear, or quadratic."""
    min_lr_factor: Annotated[float, Ge(0), Le(1)] = 0.0
    """Where a cosine ends, as a fraction of the peak."""
    decay_until: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of the steps at which a cosine ends; the rate is constant from there."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.warmup_steps and self.warmup_ratio is not None:
            yield "warmup_ratio", "set either warmup_steps or warmup_ratio"
        if self.shape != "cosine" and (self.min_lr_factor or self.decay_until != 1):
            yield "shape", "min_lr_factor and decay_until are those of a cosine"

    def warmup(self, steps: int) -> int:
        """Return the steps of warm-up in a schedule of `steps` steps."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        share = self.warmup_ratio * steps
        found = math.ceil(share) if self.warmup_rounding == "up" else int(share)
        found = min(found, self.warmup_limit or found)
        return 2 if found == 1 and self.warmup_rounding == "down" else found


def _command(tool: str, name: str) -> Command:
    return Command(
        f"recipe from-{name}", f"Convert a config of {tool}.", f"titan_migrate.command:from_{name}"
    )


@hookimpl
def titan_components() -> list[type]:
    return [FromZero]


@hookimpl
def titan_commands() -> list[Command]:
    return [
        _command("axolotl", "axolotl"),
        _command("LLaMA-Factory", "llamafactory"),
        _command("torchtune", "torchtune"),
    ]


@hookimpl
def titan_foreign_keys() -> dict[str, str]:
    from titan_migrate.known_keys import KEYS

    return KEYS


@hookimpl
def titan_foreign_config(text: str) -> tuple[str, str] | None:
    from titan_migrate.known_keys import config_of

    return config_of(text)
