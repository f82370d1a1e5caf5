"""The configs of the training programs. Torch-free; the code is in the files beside this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, MinLen

from titancli.registry.component import component, component_info
from titancli.registry.fields import Component, Slot
from titancli.rl import PATIENCE, GroupNorm, Local

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@component("loop", "pretrain", target="titancli.loops.pretrain:build")
class Pretrain:
    """Next-token training on a stream of batches."""


@component("loop", "sft", target="titancli.loops.pretrain:build")
class SFT:
    """Supervised fine-tuning: the same program as pretrain, for the loss sft."""


@component("loop", "dpo", target="titancli.loops.dpo:build")
class DPO:
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


@component("loop", "grpo", target="titancli.loops.grpo:build")
class Grpo:
    """Reinforcement learning from rewards: sample completions, score them, and train on them.

    `[loss]` and `advantage` select the algorithm (GRPO, DAPO, Dr. GRPO, GSPO, CISPO, RLOO).
    """

    task: Annotated[Component, Slot("task")]
    """Source of the prompts."""
    rewards: Annotated[list[Annotated[Component, Slot("reward")]], MinLen(1)]
    """Rewards of a completion: their sum, each multiplied by its `weight`."""
    advantage: Annotated[Component, Slot("advantage")] = field(default_factory=GroupNorm)
    """How advantages are computed from the rewards of one prompt's samples."""
    generator: Annotated[Component, Slot("generator")] = field(default_factory=Local)
    """Generator of the completions."""
    prompts: Annotated[int, Gt(0)] = 16
    """Prompts per sampling step, over all ranks."""
    samples: Annotated[int, Gt(1)] = 16
    """Completions per prompt."""
    updates: Annotated[int, Gt(0)] = 1
    """Optimizer steps per pass, each on its share of the prompts; clipping takes effect above 1."""
    passes: Annotated[int, Gt(0)] = 1
    """Passes over the completions of a sampling step."""
    moe_replay: Literal["none", "rollout"] = "none"
    """In a mixture of experts, whether tokens visit in training the experts that they visited when they were
    sampled (arXiv 2510.11370): "rollout" records these, so that trainer and sampler compute with the same
    ones. Routers still learn: scores of experts are their own."""
    mask_truncated: bool = False
    """Do not learn from completions that ran out of room; they count in their group's advantages."""
    resample_zero_std: Annotated[int, Ge(0)] = 0
    """Replace prompts whose completions all have the same reward by further ones (DAPO's dynamic sampling),
    at most this many times in a sampling step; what is left of them after that is trained on."""
    solved: float = 1.0
    """Reward from which a completion counts as solved."""
    reward_timeout: Annotated[float, Gt(0)] = 10.0
    """Timeout of a reward for one completion, in seconds."""
    reward_concurrency: Annotated[int, Gt(0)] = 64
    """Maximum calls of rewards that are under way at a time on each rank, if they are `async def`."""
    failed_reward: Literal["zero", "drop"] = "zero"
    """What happens if a reward raises, times out or is not a number: it counts as 0, or its sample is
    dropped."""
    max_failed: Annotated[int, Gt(0)] = 10
    """End the run, with a checkpoint and an error, after this many consecutive sampling steps in which every
    reward failed, or every completion was empty."""
    eval_freq: Annotated[int, Ge(0)] = 0
    """Steps between two evaluations with greedy decoding; there is always one after the last step. 0: no
    evaluation."""
    eval_prompts: Annotated[int, Gt(0)] = 100
    """Prompts per evaluation, from the start of its task; fewer if it has fewer."""
    eval_task: Annotated[Component, Slot("task")] | None = None
    """Task with held-out prompts for evaluation; None: `task`."""
    save_rollouts: Annotated[int, Ge(0)] = 1
    """Steps between two saved rollouts, in RUN/rollouts; 0: never."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        loss = component_info(recipe.loss).name
        if not recipe.loss.learns_from_samples:
            yield "", f'the loss {loss} cannot be trained on samples: set loss = "grpo", for example'
        if recipe.training.global_batch_size is not None:
            message = "a step uses loop.prompts x loop.samples: remove training.global_batch_size"
            yield "prompts", message
        if self.generator.max_new_tokens >= recipe.training.seq_len:
            message = f"with training.seq_len = {recipe.training.seq_len} it leaves no room for a prompt"
            yield "generator.max_new_tokens", message
        if recipe.tokenizer is None:
            yield "task", "prompts are text, but there is no [tokenizer]"
        waiting = recipe.comm.train_timeout_seconds
        if PATIENCE * self.reward_timeout >= waiting:
            message = f"{PATIENCE} times this value exceeds the time that the other ranks wait"
            yield "reward_timeout", f"{message} (comm.train_timeout_seconds = {waiting})"
        if self.prompts % self.updates:
            yield "updates", f"loop.prompts = {self.prompts} is not a multiple of it"
        if self.moe_replay != "none":
            yield from _replay_problems(recipe)
        steps = self.updates * self.passes
        if steps == 1:
            return
        key = "updates" if self.updates > 1 else "passes"
        if recipe.checkpoint.enable_first_step_checkpoint:
            yield key, "checkpoints are not saved between updates: remove enable_first_step_checkpoint"
        wholes = {"training.steps": recipe.training.steps, "checkpoint.interval": recipe.checkpoint.interval}
        for name, value in wholes.items():
            if value % steps:
                rule = "it" if 1 in (self.updates, self.passes) else f"updates x passes = {steps}"
                yield key, f"{name} = {value} is not a multiple of {rule}"

    def needs_reference(self, recipe: Recipe) -> bool:
        return recipe.loss.needs_reference or self.advantage.needs_reference


def _replay_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if getattr(recipe.model, "moe", None) is None:
        name = component_info(recipe.model).name
        yield "moe_replay", f"the model {name} has no mixture of experts here, whose routes it could replay"
    if recipe.debug.moe_force_load_balance:
        yield "moe_replay", "debug.moe_force_load_balance leaves routers no choice to replay: remove one"


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


COMPONENTS: list[type] = [Pretrain, SFT, DPO, Grpo, Evaluate]
