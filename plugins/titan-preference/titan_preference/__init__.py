"""Losses of preference pairs and of single answers. This file has the configs and imports no torch; the code
is in the files beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, MinLen

from titancli import component, hookimpl
from titancli.data import RowsOfExamples
from titancli.registry.component import component_info
from titancli.registry.fields import LocalPath

if TYPE_CHECKING:
    from titancli import Recipe


@component("loss", "ipo", target="titan_preference.losses:Ipo")
class Ipo:
    """Identity preference optimization (IPO, arXiv 2310.12036): a margin of 1 / (2 beta), and no more.

    Log-ratios are means over an answer's tokens, so that long and short answers have the same margin.
    """

    learns_from_pairs: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    beta: Annotated[float, Gt(0)] = 0.1
    """Strength of the pull towards the reference model, τ in the paper."""


@component("loss", "simpo", target="titan_preference.losses:Simpo")
class Simpo:
    """Simple preference optimization (SimPO, arXiv 2405.14734): without a reference model."""

    learns_from_pairs: ClassVar[bool] = True

    beta: Annotated[float, Gt(0)] = 2.0
    """Factor of the mean log-probability of an answer's tokens."""
    gamma: Annotated[float, Ge(0)] = 1.0
    """Margin by which the chosen answer is to win."""


@component("loss", "orpo", target="titan_preference.losses:Orpo")
class Orpo:
    """Odds ratio preference optimization (ORPO, arXiv 2403.07691): fine-tuning and preference in one loss.

    It needs no reference model, and starts from a base model.
    """

    learns_from_pairs: ClassVar[bool] = True

    beta: Annotated[float, Gt(0)] = 0.1
    """Weight of the odds ratio, λ in the paper."""


@component("loss", "kto", target="titan_preference.losses:Kto")
class Kto:
    """Kahneman-Tversky optimization (KTO, arXiv 2402.01306): from answers that are desirable or not.

    An answer is compared with the KL divergence from the reference model, which the loop estimates. The loss
    is averaged over answers.
    """

    needs_reference: ClassVar[bool] = True

    beta: Annotated[float, Gt(0)] = 0.1
    """Strength of the pull towards the reference model."""
    desirable_weight: Annotated[float, Ge(0)] = 1.0
    """Weight of desirable answers, λ_D in the paper."""
    undesirable_weight: Annotated[float, Ge(0)] = 1.0
    """Weight of undesirable answers, λ_U in the paper."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if component_info(recipe.loop).name != "kto":
            yield "", 'its loop has what it compares with: set loop = "kto" (to evaluate alone, loss = "sft")'
        if not (self.desirable_weight or self.undesirable_weight):
            yield "desirable_weight", "this or undesirable_weight must be above 0"


@component("loss", "apo_zero_unpaired", target="titan_preference.losses:ApoZeroUnpaired")
class ApoZeroUnpaired(Kto):
    """Anchored preference optimization without pairs (APO-zero, arXiv 2408.06266): KTO, its KL being 0.

    It makes desirable answers more probable than under the reference model, and others less.
    """


@component("dataset", "unpaired", target="titan_preference.unpaired:build")
class Unpaired(RowsOfExamples):
    """Answers that are desirable or not, each with its `label`; bad rows are skipped and counted.

    A row has a `prompt` (messages, or the text of a user message), a `completion` (messages or text), and as
    its `label` true or false. Each answer takes a row of a batch.
    """

    gives_labels: ClassVar[bool] = True

    path: Annotated[str, MinLen(1), LocalPath()]
    pairs: bool = False
    """Read rows of the dataset `preference`, each of which gives two answers: the desirable `chosen` and the
    undesirable `rejected`."""


@component("loop", "kto", target="titan_preference.kto:build")
class KtoLoop:
    """Training on single answers, relative to a reference model, with the loss kto or apo_zero_unpaired.

    The reference is a frozen copy of the initial model, or the base model with the converter lora.
    """

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if not isinstance(recipe.loss, Kto):
            name = component_info(recipe.loss).name
            yield "", f'the loss {name} does not learn from single answers: set loss = "kto"'
        read = {"dataset": recipe.dataset}
        read |= {f"validation.datasets.{name}": one for name, one in recipe.validation.datasets.items()}
        for key, dataset in read.items():
            if not getattr(dataset, "gives_labels", False):
                yield "", f'{key}: kto needs answers with labels: set type = "unpaired"'
        if recipe.training.global_batch_size == 1 and not isinstance(recipe.loss, ApoZeroUnpaired):
            yield (
                "",
                "answers are compared, and a step has only one: use a larger training.global_batch_size",
            )

    def needs_reference(self, recipe: Recipe) -> bool:
        return recipe.loss.needs_reference


@hookimpl
def titan_components() -> list[type]:
    return [Ipo, Simpo, Orpo, Kto, ApoZeroUnpaired, Unpaired, KtoLoop]
