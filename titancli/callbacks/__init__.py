"""The configs of what takes part in the steps of a run; see `titancli.protocols.Callback`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt

from titancli.registry.component import component

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


COMPONENTS: list[type] = [EMA, ParamNorm]
