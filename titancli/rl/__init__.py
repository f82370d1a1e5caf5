"""Learning from what a model writes itself: the configs of tasks, generators, rewards and advantages.

Torch-free. How tokens are drawn is in `sampling.py` and `decode.py`, which `titan generate` shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le, MinLen

from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

PATIENCE = 3
"""A reward that ran out of time so often is not asked again in the same step: other ranks are waiting."""


@component("generator", "local", target="titancli.rl.generator:build")
class Local:
    """Samples from the very model that is trained, with a key-value cache."""

    max_new_tokens: Annotated[int, Gt(0)] = 256
    """Tokens of a completion at most; a prompt that leaves less room in training.seq_len has shorter ones."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Logits are divided by this before tokens are drawn; losses see the model's own probabilities."""
    top_k: Annotated[int, Gt(0)] | None = None
    """Draw from so many most probable tokens; None: from all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Draw from the most probable tokens, as few as reach this probability together."""
    stop: list[Annotated[str, MinLen(1)]] = field(default_factory=list)
    """Texts that end a completion."""
    batch_size: Annotated[int, Gt(0)] = 256
    """Completions that a rank makes together."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        for name in ("tp", "cp", "pp", "ep"):
            degree = getattr(recipe.mesh, name)
            if degree != 1:
                yield (
                    "",
                    f"it samples from whole rows and a whole model, and mesh.{name} = {degree} cuts them",
                )


@component("advantage", "group_mean", target="titancli.rl.advantages:GroupMean")
class GroupMean:
    """A reward less the mean of its prompt's samples (Dr. GRPO)."""


@component("advantage", "group_norm", target="titancli.rl.advantages:GroupNorm")
class GroupNorm:
    """The same over the samples' standard deviation (GRPO, DAPO)."""


@component("advantage", "leave_one_out", target="titancli.rl.advantages:LeaveOneOut")
class LeaveOneOut:
    """A reward less the mean of the prompt's other samples (RLOO)."""


@component("task", "digit", target="titancli.rl.tasks:build_digit")
class Digit:
    """Say the digit that is shown, `7=`: a task to see a loop work with, from random weights."""


@component("task", "sum", target="titancli.rl.tasks:build_sum")
class Sum:
    """Add two digits and say the last digit of the sum, `3+9=`."""

    chat: bool = False
    """It is what the user says, under the tokenizer's chat template."""


@component("task", "prompts", target="titancli.rl.tasks:build_prompts")
class Prompts:
    """Prompts from the rows of JSON Lines or of a Hugging Face dataset; bad rows are skipped and counted."""

    path: Annotated[str, MinLen(1)]
    """JSON Lines (a file or a glob that ends in `.jsonl`); or a Hugging Face dataset: a local folder or file
    (begins with `/`, `./`, `../` or `~`), or a Hub name."""
    name: str | None = None
    """The configuration of a dataset on the Hub."""
    revision: str | None = None
    """The commit, tag or branch of a dataset on the Hub."""
    split: str = "train"
    """Which split of a Hugging Face dataset."""
    prompt: str = "prompt"
    """The key of a row that holds its prompt: text, or messages (`{"role": …, "content": …}` each)."""
    answer: str = "answer"
    """The key of a row that holds what is right, where rows have it; rewards are given all of the row."""
    chat: bool = False
    """Text is what the user says, under the tokenizer's chat template, as messages always are."""
    system: str | None = None
    """A message before those of the row."""
    strict: bool = False
    """A bad row (no JSON, no prompt) ends the run."""
    max_bytes: Annotated[int, Gt(0)] = 8_388_608
    """A longer line of JSON is a bad one."""
    shuffle: bool = True
    """Prompts come in an order that follows from (training.seed, epoch); false: in the order listed."""

    def __post_init__(self) -> None:
        from titancli.data import absolute_lines

        object.__setattr__(self, "path", absolute_lines(self.path))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        from titancli.data import hub_keys

        yield from hub_keys(self)
        if self.system is not None and not self.chat:
            yield "system", "a system message needs the chat template: write chat = true"


@component("reward", "exact_match", target="titancli.rl.rewards:ExactMatch")
class ExactMatch:
    """1 where the completion is the prompt's answer, apart from space around both."""

    weight: float = 1.0
    """What it is multiplied by."""
    ignore_case: bool = False
    """Whether upper and lower case are the same."""


@component("reward", "regex", target="titancli.rl.rewards:Regex")
class Regex:
    """1 where a regular expression is found, and its group `answer`, if any, is the prompt's answer."""

    weight: float = 1.0
    """What it is multiplied by."""
    pattern: Annotated[str, MinLen(1)]
    """Python's, e.g. `'####\\s*(?P<answer>-?\\d+)'`."""
    whole: bool = False
    """Whether it must match all of the completion."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        try:
            re.compile(self.pattern)
        except re.error as error:
            yield "pattern", f"{self.pattern!r} is no regular expression: {error}"


@component("reward", "numeric", target="titancli.rl.rewards:Numeric")
class Numeric:
    """1 where the completion's last number is the answer's last number."""

    weight: float = 1.0
    """What it is multiplied by."""
    tolerance: Annotated[float, Ge(0)] = 1e-6
    """How far it may be off, as a share of the answer, or of 1 where that is greater."""
    after: Annotated[str, MinLen(1)] | None = None
    """Look only behind the last place of this text, such as `"####"`; without it the reward is 0."""


@component("reward", "json_schema", target="titancli.rl.rewards:JsonSchema")
class JsonSchema:
    """1 where the completion is JSON that a schema allows; needs `pip install jsonschema`."""

    weight: float = 1.0
    """What it is multiplied by."""
    schema: dict[str, Any]
    """A JSON Schema, as a table."""


@component("reward", "length", target="titancli.rl.rewards:Length")
class Length:
    """0 up to `free` tokens, falling to -1 at `limit`: what keeps completions short (DAPO)."""

    weight: float = 1.0
    """What it is multiplied by."""
    free: Annotated[int, Ge(0)]
    """Tokens that cost nothing."""
    limit: Annotated[int, Gt(0)]
    """Tokens that cost 1."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.limit <= self.free:
            yield "limit", f"must be above free = {self.free}"


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
]
