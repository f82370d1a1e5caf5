"""Reinforcement learning from rewards: the loop grpo, with its tasks, rewards, advantages and losses. This
file has the configs and imports no torch; the code is in the files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, MinLen

from titancli import Command, Component, Slot, component, hookimpl
from titancli.data.paths import absolute_lines, hub_keys
from titancli.registry.component import component_info
from titancli.registry.fields import LocalPath
from titancli.rl import Local

if TYPE_CHECKING:
    from titancli import Recipe

PATIENCE = 3
"""Timeouts after which a reward is not called again in the same step: other ranks are waiting."""


@component("advantage", "group_mean", target="titan_rl.advantages:GroupMean")
class GroupMean:
    """Reward minus the mean over the prompt's samples (Dr. GRPO)."""


@component("advantage", "group_norm", target="titan_rl.advantages:GroupNorm")
class GroupNorm:
    """Reward minus the mean over the prompt's samples, divided by their standard deviation (GRPO, DAPO)."""


@component("advantage", "leave_one_out", target="titan_rl.advantages:LeaveOneOut")
class LeaveOneOut:
    """Reward minus the mean over the prompt's other samples (RLOO)."""


@component("advantage", "global_norm", target="titan_rl.advantages:GlobalNorm")
class GlobalNorm:
    """Rewards normalised over all samples of the step: REINFORCE++ (arXiv 2501.03262)."""

    group_mean: bool = True
    """Subtract the mean over the prompt's samples first (REINFORCE++-baseline)."""


@component("task", "digit", target="titan_rl.tasks:build_digit")
class Digit:
    """Repeat a digit: a minimal task to test a loop, starting from random weights."""


@component("task", "sum", target="titan_rl.tasks:build_sum")
class Sum:
    """Add two digits and answer with the last digit of the sum, `3+9=`."""

    chat: bool = False
    """Send the prompt as a user message, with the tokenizer's chat template."""

    @property
    def of_conversations(self) -> bool:
        return self.chat


@component("task", "prompts", target="titan_rl.tasks:build_prompts")
class Prompts:
    """Prompts from files of rows or a Hugging Face dataset; bad rows are skipped and counted."""

    path: Annotated[str, MinLen(1), LocalPath()]
    """Files of rows, a folder of `save_to_disk` or a name on the Hub, as for the dataset `chat`."""
    name: str | None = None
    """The configuration of a dataset on the Hub."""
    revision: str | None = None
    """The commit, tag or branch of a dataset on the Hub."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt: str = "prompt"
    """Key of a row's prompt: text, or a list of messages (`{"role": …, "content": …}`)."""
    answer: str = "answer"
    """Key of a row's correct answer, if there is one; rewards receive the whole row."""
    chat: bool = False
    """Send text prompts as user messages, with the tokenizer's chat template; lists of messages always use
    it."""
    system: str | None = None
    """System message, placed before the messages of the row."""
    strict: bool = False
    """End the run at a bad row (no JSON, no prompt)."""
    max_bytes: Annotated[int, Gt(0)] = 8_388_608
    """Maximum length of a line of JSON; longer ones are bad rows."""
    skip_damaged: bool = False
    """Skip and count files that cannot be decompressed or decoded; false: reject them."""
    shuffle: bool = True
    """Shuffle prompts by (training.seed, epoch); false: keep their order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_lines(self.path))

    @property
    def of_conversations(self) -> bool:
        return self.chat

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from hub_keys(self)
        if self.system is not None and not self.chat:
            yield "system", "a system message needs the chat template: set chat = true"


@component("reward", "exact_match", target="titan_rl.rewards:ExactMatch")
class ExactMatch:
    """1 if the completion equals the prompt's answer, ignoring surrounding whitespace."""

    weight: float = 1.0
    """Factor of this reward."""
    ignore_case: bool = False
    """Ignore upper and lower case."""


@component("reward", "regex", target="titan_rl.rewards:Regex")
class Regex:
    """1 if a regular expression matches and its group `answer`, if any, equals the prompt's answer."""

    weight: float = 1.0
    """Factor of this reward."""
    pattern: Annotated[str, MinLen(1)]
    """Python regular expression, e.g. `'####\\s*(?P<answer>-?\\d+)'`."""
    whole: bool = False
    """Require a match of the whole completion."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        try:
            re.compile(self.pattern)
        except re.error as error:
            yield "pattern", f"{self.pattern!r} is not a valid regular expression: {error}"


@component("reward", "numeric", target="titan_rl.rewards:Numeric")
class Numeric:
    """1 if the completion's last number equals the answer's; fractions are numbers (3/4, \\frac{3}{4}).

    A row whose answer is another expression is skipped and counted.
    """

    weight: float = 1.0
    """Factor of this reward."""
    tolerance: Annotated[float, Ge(0)] = 1e-6
    """Tolerance relative to the answer, or to 1 if that is greater."""
    after: Annotated[str, MinLen(1)] | None = None
    """Look only after the last occurrence of this text, such as `"####"`; if it is missing, the reward is
    0."""


@component("reward", "json_schema", target="titan_rl.rewards:JsonSchema")
class JsonSchema:
    """1 if the completion is JSON that is valid under a schema; needs `pip install jsonschema`."""

    weight: float = 1.0
    """Factor of this reward."""
    schema: dict[str, Any]
    """A JSON Schema, as a table. It refers to no other document."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        waiting: list[Any] = [self.schema]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                    if isinstance(to := value.get(key), str) and not to.startswith("#"):
                        why = f"{key} = {to!r} refers to another document, which would be fetched"
                        yield "schema", f'{why}: put it under "$defs", and refer to "#/$defs/NAME"'
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value


@component("reward", "length", target="titan_rl.rewards:Length")
class Length:
    """Length penalty: 0 up to `free` tokens, falling to -1 at `limit` (DAPO)."""

    weight: float = 1.0
    """Factor of this reward."""
    free: Annotated[int, Ge(0)]
    """Number of tokens without penalty."""
    limit: Annotated[int, Gt(0)]
    """Number of tokens at which the penalty is 1."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.limit <= self.free:
            yield "limit", f"must be greater than free = {self.free}"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The common fields of losses that learn from samples and their advantages."""

    learns_from_samples: ClassVar[bool] = True

    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL divergence from the initial model, of which a copy is kept if this is above 0."""
    entropy_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the entropy, which is maximised, averaged as the objective is."""
    temperature: Annotated[float, Gt(0)] | None = None
    """Divisor of the logits in log-probabilities and entropy, so that they are those of sampling; None: the
    generator's in the loop grpo, else 1."""
    importance: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Correction for a sampler whose log-probabilities differ from the model's: each token's objective is
    multiplied by the ratio of both, or by that of its whole sample. Ratios above `importance_max` are
    truncated to it, or masked: multiplied by 0."""
    importance_max: Annotated[float, Gt(0)] = 3.0
    """Upper bound of the ratios of `importance`."""

    @property
    def needs_reference(self) -> bool:
        """Return whether a copy of the initial model is kept."""
        return self.kl_coef > 0


@component("loss", "grpo", target="titan_rl.losses:Grpo")
class Grpo(Policy):
    """Clipped policy gradient per token: GRPO, or DAPO and Dr. GRPO by its fields.

    GRPO (arXiv 2402.03300) is the default. DAPO (2503.14476): clip_high = 0.28, length_norm = "token".
    Dr. GRPO (2503.20783): length_norm = "constant", with the advantage group_mean.
    """

    clip_low: Annotated[float, Ge(0)] = 0.2
    """Lower clipping bound: ratios are clipped at 1 - this."""
    clip_high: Annotated[float, Ge(0)] = 0.2
    """Upper clipping bound: ratios are clipped at 1 + this."""
    length_norm: Literal["sample", "token", "constant"] = "sample"
    """Averaging: over samples, of their means; over all tokens; or over samples, of their sums /
    `constant`."""
    constant: Annotated[int, Gt(0)] | None = None
    """Divisor of the sum over a sample's tokens, such as the generator's max_new_tokens."""
    delta: Annotated[float, Gt(1)] | None = None
    """Upper bound of ratios where the advantage is negative (dual clip, arXiv 1912.09729); None: there is
    none."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if (self.length_norm == "constant") != (self.constant is not None):
            yield "constant", 'set constant if length_norm = "constant", and only then'
        yield from _delta(self)


@component("loss", "gspo", target="titan_rl.losses:Gspo")
class Gspo(Policy):
    """Clipped policy gradient per sample (GSPO, arXiv 2507.18071)."""

    clip_low: Annotated[float, Ge(0)] = 3e-4
    """Lower clipping bound: a sample's ratio is clipped at 1 - this."""
    clip_high: Annotated[float, Ge(0)] = 4e-4
    """Upper clipping bound: a sample's ratio is clipped at 1 + this."""
    per_token: bool = True
    """The ratio is that of the whole sample to the power of 1 / length; false: of the whole sample, as in
    TRL's RLOO."""
    delta: Annotated[float, Gt(1)] | None = None
    """Upper bound of ratios where the advantage is negative (dual clip); None: there is none."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from _delta(self)


@component("loss", "cispo", target="titan_rl.losses:Cispo")
class Cispo(Policy):
    """Policy gradient with clipped importance weights for every token (CISPO, arXiv 2506.13585)."""

    clip_high: Annotated[float, Ge(0)] = 5.0
    """Upper clipping bound: weights are at most 1 + this, the paper's ε_high; what others call ε_max or
    epsilon_high is 1 + this. There is no lower bound, as in the paper's experiments."""


@component("loss", "importance_sampling", target="titan_rl.losses:ImportanceSampling")
class ImportanceSampling(Policy):
    """Policy gradient with importance weights, unclipped, averaged over tokens."""


def _delta(loss: Grpo | Gspo) -> Iterator[tuple[str, str]]:
    if loss.delta is not None and loss.delta <= 1 + loss.clip_high:
        yield "delta", f"must be greater than 1 + clip_high = {1 + loss.clip_high:g}"


@component("loop", "grpo", target="titan_rl.loop:build")
class GrpoLoop:
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


@hookimpl
def titan_components() -> list[type]:
    return [
        *(GrpoLoop, Digit, Sum, Prompts),
        *(Grpo, Gspo, Cispo, ImportanceSampling),
        *(ExactMatch, Regex, Numeric, JsonSchema, Length),
        *(GroupMean, GroupNorm, LeaveOneOut, GlobalNorm),
    ]


@hookimpl
def titan_commands() -> list[Command]:
    return [Command("rollouts", "Show the rollouts of a run, with rewards.", "titan_rl.command:command")]
