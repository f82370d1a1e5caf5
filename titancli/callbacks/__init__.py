"""The configs of what takes part in the steps of a run; see `titancli.protocols.Callback`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from titancli.registry.component import component, section

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@section
class WatchedMetric:
    """The metric of `[validation]` that a callback compares."""

    metric: str | None = None
    """Metric, such as `"validation/books/loss"`; None: the loss of the only dataset of [validation]."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more of it is better."""

    def name_of(self, recipe: Recipe | None) -> str:
        """Return the name of the metric."""
        datasets = recipe.validation.datasets if recipe is not None else {}
        return self.metric or f"validation/{next(iter(datasets), '')}/loss"

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        names = list(recipe.validation.datasets)
        if not names:
            yield "", "nothing is evaluated: add a dataset, as in [validation.datasets.NAME]"
        elif self.metric is None and len(names) > 1:
            yield "", f'there are several datasets: set metric, such as "validation/{names[0]}/loss"'
        elif not re.fullmatch(rf"validation/({'|'.join(map(re.escape, names))})/.+", self.name_of(recipe)):
            yield (
                "metric",
                f"{self.metric!r} is no metric of an evaluation, such as validation/{names[0]}/loss",
            )


@component("callback", "best", target="titancli.callbacks.best:Best")
class Best(WatchedMetric):
    """Keep the checkpoint with the best evaluation as RUN/best, a link, whatever checkpoint.keep_latest_k."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if not recipe.checkpoint.enable:
            yield "", "nothing is saved when checkpoint.enable is false"
        if sum(isinstance(one, Best) for one in recipe.callbacks) > 1:
            yield "", "one run has one best checkpoint: remove the others"
        if any(getattr(one, "name", "") == "best" for one in recipe.callbacks):
            yield (
                "",
                "another callback is named best, whose export would be exports/step-N-best: set another name",
            )


@component("callback", "early_stop", target="titancli.callbacks.early_stop:EarlyStop")
class EarlyStop(WatchedMetric):
    """End the run when evaluations no longer improve."""

    patience: Annotated[int, Gt(0)] = 3
    """Evaluations without improvement, one after another, after which the run ends."""
    min_delta: Annotated[float, Ge(0)] = 0.0
    """Smallest change that counts as an improvement."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        watched = [one.name_of(recipe) for one in recipe.callbacks if isinstance(one, EarlyStop)]
        if watched.count(self.name_of(recipe)) > 1:
            yield "", f"two of them watch {self.name_of(recipe)}: the one with less patience is enough"


COMPONENTS: list[type] = [Best, EarlyStop]
