"""DPO, and further losses of preference pairs and of single answers. This file has the configs and imports no
torch; the code is in the files beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Lt, MinLen

from titancli import component, hookimpl
from titancli.data import RowsOfExamples
from titancli.registry.component import component_info
from titancli.registry.fields import LocalPath

if TYPE_CHECKING:
    from titancli import Recipe


@component("loss", "dpo", target="titan_preference.dpo:DPO")
class DPO:
    """Direct preference optimization (DPO): make the chosen answer of a pair more probable than the rejected.

    DPO (arXiv 2305.18290), averaged over pairs; with label_smoothing cDPO (2403.00409).
    """

    beta: Annotated[float, Gt(0)] = 0.1
    """Strength of the pull towards the reference model."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Probability that the labels of a pair are swapped."""
    learns_from_pairs: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True


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


@component("dataset", "preference", target="titan_preference.pairs:build")
class Preference(RowsOfExamples):
    """Preference pairs of a `chosen` and a `rejected` answer; bad rows are skipped and counted.

    Answers are messages or text. The prompt is in `prompt` (messages, or the text of a user message), or both
    answers are whole conversations that begin alike. A pair takes two rows of a batch, so
    training.local_batch_size must be even.
    """

    path: Annotated[str, MinLen(1), LocalPath()]
    reference_logps: bool = False
    """Read `reference_chosen_logp` and `reference_rejected_logp` from each row: the summed
    log-probabilities of the answers under the reference model, which then need not be in memory."""
    gives_pairs: ClassVar[bool] = True

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if recipe.training.local_batch_size % 2:
            yield "", "a pair consists of two rows: use an even training.local_batch_size"
        if recipe.mesh.pp != 1 and recipe.pipeline.microbatch_size % 2:
            yield "", "a pair consists of two rows: use an even pipeline.microbatch_size"


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


@component("loop", "dpo", target="titan_preference.dpo_loop:build")
class DpoLoop:
    """Direct preference optimization (DPO, arXiv 2305.18290), relative to a reference model.

    The reference is a frozen copy of the initial model, the base model with the converter lora, or
    log-probabilities stored in the dataset (`dataset.reference_logps`).
    """

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if not recipe.loss.learns_from_pairs:
            name = component_info(recipe.loss).name
            yield "", f'the loss {name} cannot be trained on pairs: set loss = "dpo"'
        if recipe.dataset is None or not recipe.dataset.gives_pairs:
            yield "", 'dpo needs pairs: set [dataset] type = "preference"'
        for name, held_out in recipe.validation.datasets.items():
            if not held_out.gives_pairs:
                yield "", f'validation.datasets.{name}: dpo is evaluated on pairs: set type = "preference"'

    def needs_reference(self, recipe: Recipe) -> bool:
        read = (recipe.dataset, *recipe.validation.datasets.values())
        needed = recipe.loss.needs_reference
        return needed and not all(data.reference_logps for data in read)


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
    return [DPO, Ipo, Simpo, Orpo, Kto, ApoZeroUnpaired, Preference, Unpaired, DpoLoop, KtoLoop]
