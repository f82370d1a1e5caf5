"""Proofs: compare every layout with one process, repeat runs, and look at one step in detail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from titancli import Command, component, hookimpl
from titancli.errors import UsageError

if TYPE_CHECKING:
    from titancli import Recipe

COMMANDS = {
    "prove": "Prove that every layout computes what one process does.",
    "reproduce": "Run a recorded run again and compare the numbers.",
    "replay": "Repeat a step of a run and look at it from inside.",
    "bisect": "Find where two runs that should agree diverge.",
}


@component("callback", "probe", target="titan_proof.probe:Probe")
class Probe:
    """The callback that `titan replay` adds to a recipe: it looks at one step, with which the run ends."""

    step: Annotated[int, Gt(0)]
    """The step, counted from 1."""
    layers: list[str] = field(default_factory=list)
    """Modules and parameters to look at one by one: numbers of layers, names or patterns."""
    gradients: Annotated[int, Ge(0)] = 64
    """Number of rows whose own gradient is computed; those with the highest loss come first."""
    without: list[Annotated[int, Gt(0)]] = field(default_factory=list)
    """Rows, counted from 1, without which the step is also tried."""
    overrides: list[str] = field(default_factory=list)
    """Other settings, `KEY=VALUE`, with which the step is also tried."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        from titan_proof.variation import check_variation

        try:
            check_variation(self.overrides)
        except UsageError as error:
            yield "overrides", error.message
        if any(isinstance(one, Probe) for one in recipe.callbacks[:-1]):
            yield "step", "the run ends with this step: probe must be the last of the callbacks"
        if recipe.loop.joins_other_runs:
            yield (
                "step",
                "a step of several runs that train together cannot be replayed by one of them; titan prove "
                "and the callback recheck look for wrong numbers without the others",
            )


@component("callback", "recheck", target="titan_proof.recheck:Rechecks")
class Recheck:
    """Compute the gradients of some steps twice and compare them bit by bit, to find a device that computes
    wrong numbers.

    Where they differ the run ends before the step is applied, with an error that names rank, host, device and
    tensor. Such a step takes about twice as long; other results are unchanged. On a GPU it needs
    `debug.deterministic`.
    """

    effect: ClassVar = "running"

    every: Annotated[int, Gt(0)] = 100
    """Interval in steps."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if sum(isinstance(one, Recheck) for one in recipe.callbacks) > 1:
            yield "every", "two of them would compute the same steps: remove one"


@hookimpl
def titan_components() -> list[type]:
    return [Probe, Recheck]


@hookimpl
def titan_commands() -> list[Command]:
    return [Command(name, help, f"titan_proof.commands.{name}:command") for name, help in COMMANDS.items()]
