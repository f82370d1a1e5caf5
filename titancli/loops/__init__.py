"""The training programs. This file is the menu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from titancli.registry.component import Component, Slot, component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@component("loop", "pretrain", target="titancli.loops.pretrain:build")
class Pretrain:
    """Next-token training on a stream of batches."""


@component("loop", "sft", target="titancli.loops.sft:build")
class SFT:
    """Supervised fine-tuning: training as in pretrain, and evaluation on data that are held out."""

    validation: Annotated[Component, Slot("dataset")] | None = None
    """What the model is evaluated on, with `repeat = false`; None: nothing."""
    eval_freq: Annotated[int, Gt(0)] = 100
    """Steps between two evaluations; after the last step there is one too."""
    eval_batches: Annotated[int, Gt(0)] | None = None
    """Batches of a data-parallel rank in one evaluation, from the beginning; None: all."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        endless = getattr(self.validation, "repeat", False)
        if endless and self.eval_batches is None:
            yield "validation.repeat", "an evaluation would never end: write false, or set eval_batches"


COMPONENTS: list[type] = [Pretrain, SFT]
