"""The configs of the training programs. Torch-free; the code is in the files beside this one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@component("loop", "pretrain", target="titancli.loops.pretrain:build")
class Pretrain:
    """Next-token training on a stream of batches."""


@component("loop", "sft", target="titancli.loops.pretrain:build")
class SFT:
    """Supervised fine-tuning: the same program as pretrain, for the loss sft."""


@component("loop", "evaluate", target="titancli.loops.evaluate:build")
class Evaluate:
    """Evaluation of `[validation]` alone, once, without an optimizer: what `titan eval` runs."""

    trains: ClassVar[bool] = False

    checkpoint: Path | None = None
    """Checkpoint to evaluate; None: the weights that the recipe starts from."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if not recipe.validation.datasets:
            yield "", "there is nothing to evaluate: add [validation.datasets.NAME]"

    def needs_reference(self, recipe: Recipe) -> bool:
        loss = recipe.loss
        if not (loss.learns_from_pairs and loss.needs_reference):
            return False
        read = recipe.validation.datasets.values()
        return not all(data.reference_logps for data in read)


COMPONENTS: list[type] = [Pretrain, SFT, Evaluate]
