"""The configs of what takes part in the steps of a run; see `titancli.protocols.Callback`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from titancli.registry.component import component, section

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@component("callback", "ema", target="titancli.callbacks.ema:EMA")
class EMA:
    """Exponential moving average of the weights, in fp32, saved and resumed with checkpoints."""

    decay: Annotated[float, Gt(0), Lt(1)] = 0.999
    """Weight of the average in each step; the new weights have the rest."""
    export: bool = True
    """Save the average when the run has finished, as RUN/exports/step-N-NAME: a checkpoint to generate from,
    to convert to a Hugging Face folder, or to start from (`weights`)."""
    name: str = "ema"
    """Name of the average in checkpoints and exports."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.name):
            yield "name", f"{self.name!r} must consist of letters, digits, - and _: it names a folder"
        if sum(isinstance(one, EMA) and one.name == self.name for one in recipe.callbacks) > 1:
            yield "name", f"two averages would be saved as {self.name!r}: give them different names"


@component("callback", "param_norm", target="titancli.callbacks.param_norm:ParamNorm")
class ParamNorm:
    """The 2-norm of all trained weights, as the metric `param_norm` of each step."""


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
        if any(isinstance(one, EMA) and one.name == "best" for one in recipe.callbacks):
            yield "", "an average of the same name would be saved as exports/step-N-best: set another name"


@component("callback", "early_stop", target="titancli.callbacks.early_stop:EarlyStop")
class EarlyStop(WatchedMetric):
    """End the run when evaluations no longer improve."""

    patience: Annotated[int, Gt(0)] = 3
    """Evaluations without improvement, one after another, after which the run ends."""
    min_delta: Annotated[float, Ge(0)] = 0.0
    """Smallest change that counts as an improvement."""


COMPONENTS: list[type] = [EMA, ParamNorm, Best, EarlyStop]
