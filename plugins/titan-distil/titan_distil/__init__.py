"""Knowledge distillation. This file has the configs and imports no torch; the code is in the files beside
it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from titancli import Component, Slot, TitanError, component, hookimpl, section
from titancli.layout.degrees import Mesh
from titancli.registry.component import component_info
from titancli.rl import Local

if TYPE_CHECKING:
    from titancli import Recipe


@section
class Teacher:
    """The model whose distributions the student learns."""

    weights: Path | None = None
    """Its weights: a checkpoint, or a Hugging Face folder."""
    topk: Path | None = None
    """In place of the teacher, what the loop `distil_store` has stored of it: RUN/topk. If `weights` are set,
    too, they must be those that it was made with."""
    model: Annotated[Component, Slot("model")] | None = None
    """Its model; None: the one of the checkpoint, or that the folder's config.json describes."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of its weights and of its computations."""
    mesh: Mesh | None = None
    """Its layout, with as many data-parallel ranks as the student's; None: the student's."""

    def config(self) -> Any:
        """Return the config of its model.

        Raises:
            TitanError: `weights` describe no model.
        """
        from titancli.recipe import model_in  # loads all that reads recipes

        return self.model if self.weights is None or self.model is not None else model_in(self.weights)

    def recipe(self, student: Recipe) -> Recipe:
        """Return the recipe that it is built from: the student's, with another model, weights, dtype and
        layout.

        Raises:
            TitanError: `weights` describe no model.
        """
        from titancli.loops import Pretrain  # whoever lists components needs none of these
        from titancli.losses import CrossEntropy
        from titancli.recipe.schema import ActivationCheckpoint, Validation

        return replace(
            student,
            model=self.config(),
            weights=self.weights,
            mesh=self.mesh or student.mesh,
            training=replace(student.training, dtype=self.dtype, mixed_precision_param=self.dtype),
            checkpoint=replace(student.checkpoint, model_differs=[]),
            activation_checkpoint=ActivationCheckpoint(mode="none"),
            converters=[],
            callbacks=[],
            validation=Validation(),
            loss=CrossEntropy(),
            loop=Pretrain(),
        )


@component("loop", "distil", target="titan_distil.loop:build")
class Distil:
    """Distillation: train a student on the distributions that a frozen teacher has for the rows of a dataset.

    The loss is `distil`.
    """

    teacher: Teacher
    """The teacher."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if component_info(recipe.loss).name != "distil":
            yield "", f'it has its own loss, not {component_info(recipe.loss).name}: set loss = "distil"'
        if recipe.dataset is None and not isinstance(self, DistilOnPolicy):
            yield "", "distil trains on a dataset"
        if recipe.mesh.pp > 1:
            yield "", "distil does not support pipelines: set mesh.pp = 1"
        if self.teacher.topk is not None:
            yield from self._check_stored(recipe)
        elif self.teacher.weights is None:
            yield "teacher.weights", "the teacher needs weights, or topk: what was stored of it"
        if self.teacher.mesh is not None and self.teacher.mesh.pp > 1:
            yield "teacher.mesh.pp", "a teacher cannot be a pipeline: set it to 1"
        if ":/" in str(self.teacher.weights):
            yield "teacher.weights", "must be a folder on this machine: `titan download` fetches one"
        elif self.teacher.weights is None:
            return
        elif self.teacher.weights.exists() or self.teacher.model is not None:
            yield from self._check_vocabulary(recipe)

    def frozen_models(self, recipe: Recipe) -> list[Recipe]:
        return [] if self.teacher.topk is not None else [self.teacher.recipe(recipe)]

    def _check_stored(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.validation.datasets:
            message = (
                "nothing is stored of the rows of [validation]: remove its datasets, or set weights alone"
            )
            yield "teacher.topk", message
        if getattr(recipe.loss, "temperature", 1.0) != 1.0:
            yield "teacher.topk", "the most probable tokens have the temperature 1: set loss.temperature = 1"

    def _check_vocabulary(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        try:
            teacher = self.teacher.config().vocab_size
        except TitanError as error:
            yield "teacher.weights", f"{error.message} (loop.teacher.model can be set)"
            return
        student = recipe.model.vocab_size
        if None not in (teacher, student) and teacher != student:
            message = f"the teacher's vocabulary has {teacher} tokens, the student's {student}"
            key = "teacher.weights" if self.teacher.model is None else "teacher.model"
            yield key, f"{message}: distributions over different tokens cannot be compared"


@component("loop", "distil_on_policy", target="titan_distil.on_policy:build")
class DistilOnPolicy(Distil):
    """On-policy distillation (GKD, arXiv 2306.13649): the student completes prompts, and learns the
    distributions that a frozen teacher has for its completions.

    The loss is `distil`, usually with `divergence = "reverse_kl"`.
    """

    task: Annotated[Component, Slot("task")]
    """Source of the prompts."""
    generator: Annotated[Component, Slot("generator")] = field(default_factory=Local)
    """Generator of the completions."""
    prompts: Annotated[int, Gt(0)] = 16
    """Prompts per step, over all ranks."""
    samples: Annotated[int, Gt(0)] = 4
    """Completions per prompt; each has a row of its own."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.teacher.topk is not None:
            yield "teacher.topk", "nothing is stored of completions: set teacher.weights"
        if recipe.training.global_batch_size is not None:
            message = "a step uses loop.prompts x loop.samples: remove training.global_batch_size"
            yield "prompts", message
        if self.generator.max_new_tokens >= recipe.training.seq_len:
            message = f"with training.seq_len = {recipe.training.seq_len} it leaves no room for a prompt"
            yield "generator.max_new_tokens", message
        if recipe.tokenizer is None:
            yield "task", "prompts are text, but there is no [tokenizer]"


@component("loop", "distil_store", target="titan_distil.store:build")
class DistilStore:
    """Store the most probable tokens of the recipe's model for the rows of a training run, in RUN/topk.

    The recipe is the student's, with the teacher as `model` and `weights`; nothing is trained.
    """

    trains: ClassVar[bool] = False
    reads_dataset: ClassVar[bool] = True

    k: Annotated[int, Gt(0)] = 64
    """Tokens stored at each position, with their log-probabilities: 8 bytes each."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.mesh.pp > 1:
            yield "", "distil_store does not support pipelines: set mesh.pp = 1"
        if recipe.dataset is None:
            yield "", "distil_store reads a dataset"
        if recipe.weights is None:
            yield "", "distil_store needs the teacher's weights: set weights"
        words = recipe.model.vocab_size
        if words is not None and self.k >= words:
            yield "k", f"the model's vocabulary has only {words} tokens"


@component("loss", "distil", target="titan_distil.losses:Distil")
class DistilLoss:
    """The divergence of the student's distributions from the teacher's, averaged over all targets.

    GKD (arXiv 2306.13649): forward KL, reverse KL, or generalised JSD, over the whole vocabulary, and in
    chunks: the logits of all rows never exist at once.
    """

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """KL(teacher || student), KL(student || teacher), or generalised Jensen-Shannon divergence."""
    beta: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Weight of the teacher in the mixture of `jsd`: near 0 like forward KL, near 1 like reverse KL."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Divisor of both models' logits in the divergence, which is not multiplied by its square."""
    sft_weight: Annotated[float, Ge(0), Le(1)] = 0.0
    """Weight w of the cross-entropy of the targets: the loss is (1 - w) x divergence + w x cross-entropy."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if component_info(recipe.loop).name not in ("distil", "distil_on_policy"):
            yield "", 'it needs a teacher: set [loop] type = "distil" (to evaluate without one, loss = "sft")'


@hookimpl
def titan_components() -> list[type]:
    return [Distil, DistilOnPolicy, DistilStore, DistilLoss]


@hookimpl
def titan_recipes() -> Path:
    return Path(__file__).parent / "recipes"
