"""Learning from sampled text: the configs of tasks, generators, rewards and advantages.

Without torch. Sampling is in `complete.py`, `decode.py` and `sampling.py`, which `titan generate` shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le, MinLen

from titancli.registry.component import component
from titancli.registry.fields import LocalPath

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

PATIENCE = 3
"""Timeouts after which a reward is not called again in the same step: other ranks are waiting."""


@component("generator", "local", target="titancli.rl.generator:build")
class Local:
    """Samples from the model in training itself, with a key-value cache."""

    max_new_tokens: Annotated[int, Gt(0)] = 256
    """Maximum tokens per completion; less if the prompt leaves less room in training.seq_len."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Sampling temperature; losses divide logits by it, too."""
    top_k: Annotated[int, Gt(0)] | None = None
    """Sample from this many most probable tokens; None: from all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with this cumulative probability."""
    stop: list[Annotated[str, MinLen(1)]] = field(default_factory=list)
    """Stop sequences that end a completion."""
    batch_size: Annotated[int, Gt(0)] = 256
    """Completions that each rank makes together; where one ends, the next begins."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.mesh.pp != 1:
            yield "", f"it samples from a whole model, but mesh.pp = {recipe.mesh.pp} cuts it into stages"


@component("advantage", "group_mean", target="titancli.rl.advantages:GroupMean")
class GroupMean:
    """Reward minus the mean over the prompt's samples (Dr. GRPO)."""


@component("advantage", "group_norm", target="titancli.rl.advantages:GroupNorm")
class GroupNorm:
    """Reward minus the mean over the prompt's samples, divided by their standard deviation (GRPO, DAPO)."""


@component("advantage", "leave_one_out", target="titancli.rl.advantages:LeaveOneOut")
class LeaveOneOut:
    """Reward minus the mean over the prompt's other samples (RLOO)."""


@component("advantage", "global_norm", target="titancli.rl.advantages:GlobalNorm")
class GlobalNorm:
    """Rewards normalised over all samples of the step: REINFORCE++ (arXiv 2501.03262)."""

    group_mean: bool = True
    """Subtract the mean over the prompt's samples first (REINFORCE++-baseline)."""


@component("task", "digit", target="titancli.rl.tasks:build_digit")
class Digit:
    """Repeat a digit: a minimal task to test a loop, starting from random weights."""


@component("task", "sum", target="titancli.rl.tasks:build_sum")
class Sum:
    """Add two digits and answer with the last digit of the sum, `3+9=`."""

    chat: bool = False
    """Send the prompt as a user message, with the tokenizer's chat template."""


@component("task", "prompts", target="titancli.rl.tasks:build_prompts")
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
        from titancli.data.paths import absolute_lines

        object.__setattr__(self, "path", absolute_lines(self.path))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        from titancli.data.paths import hub_keys

        yield from hub_keys(self)
        if self.system is not None and not self.chat:
            yield "system", "a system message needs the chat template: set chat = true"


@component("reward", "exact_match", target="titancli.rl.rewards:ExactMatch")
class ExactMatch:
    """1 if the completion equals the prompt's answer, ignoring surrounding whitespace."""

    weight: float = 1.0
    """Factor of this reward."""
    ignore_case: bool = False
    """Ignore upper and lower case."""


@component("reward", "regex", target="titancli.rl.rewards:Regex")
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


@component("reward", "numeric", target="titancli.rl.rewards:Numeric")
class Numeric:
    """1 if the completion's last number equals the answer's last number."""

    weight: float = 1.0
    """Factor of this reward."""
    tolerance: Annotated[float, Ge(0)] = 1e-6
    """Tolerance relative to the answer, or to 1 if that is greater."""
    after: Annotated[str, MinLen(1)] | None = None
    """Look only after the last occurrence of this text, such as `"####"`; if it is missing, the reward is
    0."""


@component("reward", "json_schema", target="titancli.rl.rewards:JsonSchema")
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


@component("reward", "length", target="titancli.rl.rewards:Length")
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


COMPONENTS: list[type] = [
    Digit,
    Sum,
    Prompts,
    Local,
    ExactMatch,
    Regex,
    Numeric,
    JsonSchema,
    Length,
    GroupMean,
    GroupNorm,
    LeaveOneOut,
    GlobalNorm,
]
