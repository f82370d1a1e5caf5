"""The configs of the training programs. Torch-free; the code is in the files beside this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, MinLen

from titancli.registry.component import Component, Slot, component, component_info
from titancli.rl import PATIENCE, GroupNorm, Local

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
        yield from _check_evaluation(self.validation, self.eval_batches)


@component("loop", "dpo", target="titancli.loops.dpo:build")
class DPO:
    """Direct preference optimisation (arXiv 2305.18290) of pairs, against the model that the run began with.

    The reference is a frozen copy of it; with the converter lora the base itself; or log-probabilities that
    the data bring along (`dataset.reference_logps`).
    """

    validation: Annotated[Component, Slot("dataset")] | None = None
    """Pairs that the model is evaluated on, with `repeat = false`; None: none."""
    eval_freq: Annotated[int, Gt(0)] = 100
    """Steps between two evaluations; after the last step there is one too."""
    eval_batches: Annotated[int, Gt(0)] | None = None
    """Batches of a data-parallel rank in one evaluation, from the beginning; None: all."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from _check_evaluation(self.validation, self.eval_batches)
        if not getattr(recipe.loss, "learns_from_pairs", False):
            name = component_info(recipe.loss).name
            yield "", f'the loss {name} does not learn from pairs: write loss = "dpo"'
        if not getattr(recipe.dataset, "gives_pairs", False):
            yield "", 'dpo learns from pairs: write [dataset] type = "preference"'
        validation = self.validation
        if validation is not None and not getattr(validation, "gives_pairs", False):
            yield "validation", 'dpo is evaluated on pairs: write type = "preference"'


@component("loop", "grpo", target="titancli.loops.grpo:build")
class Grpo:
    """Reinforcement learning from rewards: sample, score, and train on what was sampled.

    Which algorithm it is (GRPO, DAPO, Dr. GRPO, GSPO, CISPO, RLOO) is said by `[loss]` and `advantage`.
    """

    task: Annotated[Component, Slot("task")]
    """Where prompts come from."""
    rewards: Annotated[list[Annotated[Component, Slot("reward")]], MinLen(1)]
    """What a completion is worth: the sum of these, each times its `weight`."""
    advantage: Annotated[Component, Slot("advantage")] = field(default_factory=GroupNorm)
    """What is made of the rewards of one prompt's samples."""
    generator: Annotated[Component, Slot("generator")] = field(default_factory=Local)
    """What writes completions."""
    prompts: Annotated[int, Gt(0)] = 16
    """Prompts that are asked together, over all ranks."""
    samples: Annotated[int, Gt(1)] = 16
    """Completions of each prompt."""
    updates: Annotated[int, Gt(0)] = 1
    """Optimizer steps on what was sampled, each on its share of the prompts; above 1 losses clip."""
    solved: float = 1.0
    """A completion whose reward is at least this counts as solved."""
    reward_timeout: Annotated[float, Gt(0)] = 10.0
    """Seconds that a reward may take for one completion."""
    failed_reward: Literal["zero", "drop"] = "zero"
    """A reward that raised, took too long, or was no number counts 0; or its sample is left out."""
    max_failed: Annotated[int, Gt(0)] = 10
    """So many samplings in a row in which every reward failed end the run, with a checkpoint and an error."""
    eval_freq: Annotated[int, Ge(0)] = 0
    """Steps between two evaluations on most probable completions; after the last step there is one too. 0:
    none."""
    eval_prompts: Annotated[int, Gt(0)] = 100
    """Prompts of one evaluation: the first ones of its task."""
    eval_task: Annotated[Component, Slot("task")] | None = None
    """Prompts that are held out; None: those of `task`."""
    save_rollouts: Annotated[int, Ge(0)] = 1
    """What was sampled is kept every so many steps, in RUN/rollouts; 0: never."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        loss = component_info(recipe.loss).name
        if not getattr(recipe.loss, "learns_from_samples", False):
            yield "", f'the loss {loss} does not learn from samples: write loss = "grpo", for one'
        if recipe.training.global_batch_size is not None:
            message = "a step learns from loop.prompts x loop.samples: leave training.global_batch_size out"
            yield "prompts", message
        if getattr(self.generator, "max_new_tokens", 0) >= recipe.training.seq_len:
            message = f"with training.seq_len = {recipe.training.seq_len} it leaves no room for a prompt"
            yield "generator.max_new_tokens", message
        if recipe.tokenizer is None:
            yield "task", "prompts are text, and there is no [tokenizer]"
        waiting = recipe.comm.train_timeout_seconds
        if PATIENCE * self.reward_timeout >= waiting:
            message = f"{PATIENCE} times this is beyond what other ranks wait for in all"
            yield "reward_timeout", f"{message} (comm.train_timeout_seconds = {waiting})"
        if self.prompts % self.updates:
            yield "updates", f"loop.prompts = {self.prompts} is not a multiple of it"
        if self.updates == 1:
            return
        if recipe.checkpoint.enable_first_step_checkpoint:
            yield "updates", "there is no checkpoint within updates: leave enable_first_step_checkpoint out"
        wholes = {"training.steps": recipe.training.steps, "checkpoint.interval": recipe.checkpoint.interval}
        for name, value in wholes.items():
            if value % self.updates:
                yield "updates", f"{name} = {value} is not a multiple of it"


def _check_evaluation(validation: Any, batches: int | None) -> Iterator[tuple[str, str]]:
    if getattr(validation, "repeat", False) and batches is None:
        yield "validation.repeat", "an evaluation would never end: write false, or set eval_batches"


COMPONENTS: list[type] = [Pretrain, SFT, DPO, Grpo]
