"""Heads: rewards, classes and embeddings of texts. This file has the configs and imports no torch; the code
is in the files beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, MinLen

from titan_preference import Preference
from titancli import component, hookimpl, section
from titancli.data import RowsOfExamples
from titancli.registry.component import component_info
from titancli.registry.fields import LocalPath

if TYPE_CHECKING:
    from titancli import Recipe

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]


def _datasets(recipe: Recipe) -> Iterator[tuple[str, object]]:
    """Yield the recipe's datasets, each with its key."""
    if recipe.dataset is not None:
        yield "dataset", recipe.dataset
    for name, one in recipe.validation.datasets.items():
        yield f"validation.datasets.{name}", one


# ----------------------------------------------------------------------------------------------- losses


@component("loss", "reward", target="titan_heads.losses:Reward")
class Reward:
    """Pairwise reward (Bradley-Terry): the chosen answer of a pair gets a higher score than the rejected one.

    As TRL's RewardTrainer: -log sigmoid(chosen - rejected - margin), averaged over pairs. The score is a
    linear function of the last hidden state of the last token.
    """

    center: Annotated[float, Ge(0)] = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores around 0 (arXiv 2312.09244); TRL's
    center_rewards_coefficient."""
    pad_id: Annotated[int, Ge(0)] | None = None
    """`pad_token_id` of an exported folder; None: that of the folder that the run started from, if any."""

    learns_from_pairs: ClassVar[bool] = True

    def hf_form(self, form: Any, shapes: Any, config_json: Mapping[str, Any] | None = None) -> Any:
        from titan_heads.hf import classifier, form_of

        return form_of(form, classifier(["reward"], "regression", self.pad_id), shapes, config_json)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        for key, dataset in _datasets(recipe):
            if component_info(dataset).name == "preference" or not dataset.gives_pairs:  # type: ignore[attr-defined]
                yield "", f'it needs pairs of whole rows: set type = "reward_pairs" in [{key}]'
        if component_info(recipe.loop).name == "dpo":
            yield "", 'it compares with no reference model: set loop = "sft"'


@component("loss", "classification", target="titan_heads.losses:Classification")
class Classification:
    """Classification of documents: cross-entropy over classes, or the squared error of one number.

    As transformers' classes for sequence classification. The logits are linear functions of the last hidden
    state of the last token, averaged over documents.
    """

    classes: list[str] = field(default_factory=list)
    """Names of the classes, in the order of their logits; none for a regression."""
    problem_type: Problem = "single_label_classification"
    """One class for each document; any number of them (binary cross-entropy of each); or a number, without
    classes (squared error)."""
    pad_id: Annotated[int, Ge(0)] | None = None
    """`pad_token_id` of an exported folder; None: that of the folder that the run started from, if any."""

    @property
    def outputs(self) -> int:
        """Return the number of logits."""
        return len(self.classes) or 1

    def hf_form(self, form: Any, shapes: Any, config_json: Mapping[str, Any] | None = None) -> Any:
        from titan_heads.hf import classifier, form_of

        return form_of(
            form, classifier(self.classes or ["value"], self.problem_type, self.pad_id), shapes, config_json
        )

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.problem_type == "regression" and self.classes:
            yield "classes", "a regression has no classes: remove them"
        least = {"single_label_classification": 2, "multi_label_classification": 1, "regression": 0}
        if len(self.classes) < least[self.problem_type]:
            yield "classes", f"{self.problem_type} needs the names of at least {least[self.problem_type]}"
        if len(set(self.classes)) < len(self.classes):
            yield "classes", "two of them have the same name"
        for key, dataset in _datasets(recipe):
            if not isinstance(dataset, Labelled):
                continue
            if dataset.classes != self.classes:
                yield "classes", f"{key}.classes must be the same, in the same order"
            if dataset.several != (self.problem_type == "multi_label_classification"):
                yield "problem_type", f"{key}.several is {str(dataset.several).lower()}"


@component("loss", "embedding", target="titan_heads.losses:Embedding")
class Embedding:
    """Contrastive embeddings (InfoNCE): an anchor is nearest to its positive, among those of other anchors.

    Negatives are all other positives, and all hard negatives, of the micro-batch: those of
    training.local_batch_size rows, on each rank by itself. Averaged over anchors.
    """

    pool: Literal["last", "mean"] = "last"
    """The embedding: the last hidden state of the last token, or the mean of those of all tokens."""
    temperature: Annotated[float, Gt(0)] = 0.05
    """Divisor of the cosine similarities."""

    def hf_form(self, form: Any, shapes: Any, config_json: Mapping[str, Any] | None = None) -> Any:
        from titan_heads.hf import BASE, form_of

        return form_of(form, BASE, shapes, config_json)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        rows = recipe.training.local_batch_size
        for key, dataset in _datasets(recipe):
            if not isinstance(dataset, EmbeddingPairs):
                yield "", f'it needs anchors and positives: set type = "embedding_pairs" in [{key}]'
            elif rows < 2 * dataset.unit:
                yield "", f"with training.local_batch_size = {rows} no anchor has a negative"
        if recipe.mesh.pp != 1 and recipe.pipeline.microbatch_size != rows:
            message = f"negatives are those of one micro-batch: set pipeline.microbatch_size = {rows}"
            yield "", f"{message}, as training.local_batch_size"


# --------------------------------------------------------------------------------------------- datasets


@section
class Documents(RowsOfExamples):
    """Fields of datasets of whole documents."""

    predicts_tokens: ClassVar[bool] = False

    append_end: bool = False
    """Append the end marker to a text. A conversation ends as its chat template says."""
    too_long: Literal["cut", "skip"] = "cut"
    """Documents longer than training.seq_len tokens: truncate (and count) them, or treat them as bad rows."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        yield from _no_targets(self, recipe)


def _no_targets(config: RowsOfExamples, recipe: Recipe) -> Iterator[tuple[str, str]]:
    loss = component_info(recipe.loss)
    if loss.target.startswith("titancli."):
        needed = {"reward_pairs": "reward", "labelled": "classification", "embedding_pairs": "embedding"}
        name = needed[component_info(config).name]
        yield (
            "",
            f'the loss {loss.name} predicts tokens, which these rows do not ask for: set loss = "{name}"',
        )
    if config.trailing_newline:
        yield "trailing_newline", "no token is predicted, and all are inputs: remove it"


@component("dataset", "labelled", target="titan_heads.data:build_labelled")
class Labelled(Documents):
    """Documents with labels; bad rows are skipped and counted.

    A row is a `text` or a conversation, in any format of the dataset `chat`, and has a `label`: the name or
    the number of a class, a list of them, or a number.
    """

    path: Annotated[str, MinLen(1), LocalPath()]
    classes: list[str] = field(default_factory=list)
    """Names of the classes; none: labels are numbers."""
    several: bool = False
    """Whether labels are lists of classes."""
    pack: bool = True
    """Pack several documents into a row, with separate attention; false: one document per row."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.several and not self.classes:
            yield "classes", "labels are lists of classes, but there are none: name them"
        ring = recipe.parallelize.context_parallel == "ring"
        if self.pack and ring and recipe.mesh.cp != 1:
            message = 'parallelize.context_parallel = "ring" cannot separate the documents of a row: use '
            yield "pack", message + 'false, or "allgather"'


@component("dataset", "reward_pairs", target="titan_heads.data:build_reward_pairs")
class RewardPairs(Preference):
    """Preference pairs for the loss reward: rows as for the dataset preference."""

    predicts_tokens: ClassVar[bool] = False

    path: Annotated[str, MinLen(1), LocalPath()]
    margin: bool = False
    """Read a row's `margin`, by which the chosen score is to exceed the rejected one."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.reference_logps:
            yield "reference_logps", "a reward needs no reference model: remove it"
        yield from _no_targets(self, recipe)


@component("dataset", "embedding_pairs", target="titan_heads.data:build_embedding_pairs")
class EmbeddingPairs(Documents):
    """Texts that belong together: rows of `anchor` and `positive`, and a hard `negative` if that is wanted.

    Each is a text or a list of messages, and takes a row of a batch.
    """

    path: Annotated[str, MinLen(1), LocalPath()]
    negatives: bool = False
    """Read a `negative` of each row, too: it is one for all anchors of its micro-batch."""
    gives_groups: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        """Return the number of rows that belong together."""
        return 3 if self.negatives else 2

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if recipe.training.local_batch_size % self.unit:
            yield "", f"an example takes {self.unit} rows: use a multiple as training.local_batch_size"


# ---------------------------------------------------------------------------------------------- rewards


@component("reward", "reward_model", target="titan_heads.model:RewardModel")
class RewardModel:
    """The score of a reward model, trained with the loss reward: of the prompt with its completion."""

    weight: float = 1.0
    """Factor of this reward."""
    checkpoint: Path
    """Its run, or one of its checkpoints."""


@hookimpl
def titan_components() -> list[type]:
    return [Reward, Classification, Embedding, Labelled, RewardPairs, EmbeddingPairs, RewardModel]


@hookimpl
def titan_recipes() -> Path:
    return Path(__file__).parent / "recipes"
