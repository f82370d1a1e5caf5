"""Slots of loops that learn from samples: tasks, generators, rewards, advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from titancli.protocols.data import Tokenizer
    from titancli.protocols.samples import Completion, Prompt, Sample


class TaskDefaults(Protocol):
    """Optional members of a task."""

    count: int | None = None
    """Number of different prompts, numbered from 0, before they repeat; None: unlimited."""


class Task(TaskDefaults, Protocol):
    """Provides prompts by number: a number always gives the same prompt, on every rank and after a
    resume."""

    identity: Mapping[str, Any]
    """Small plain JSON that is equal only if the prompts are. A resume compares it."""

    def prompt(self, number: int) -> Prompt:
        """Return the prompt with this number, 0, 1, … without end."""
        ...


class TaskBuilder(Protocol):
    def __call__(self, config: Any, *, seed: int) -> Task: ...


class GeneratorDefaults(Protocol):
    """Optional members of a generator."""

    temperature: float = 1.0
    """The temperature of the log-probabilities of the last samples, which are those before top-k and top-p.
    Losses divide logits by it."""
    record_routes: Callable[[], None] | None = None
    """`record_routes()`: from then on each completion that is not greedy has its `routes`. None: it cannot
    record them."""


class Generator(GeneratorDefaults, Protocol):
    """Generates completions with the weights of an engine.

    A generator with its own copy of the weights (a vLLM server) gets them in `update` from
    `engine.weights()`: Hugging Face names and whole tensors, one at a time, on rank 0.
    """

    def update(self, version: int) -> None:
        """Take over new weights. Called on every rank before samples from weights that the generator has not
        seen are needed. `version` counts optimizer steps."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        greedy: bool = False,
    ) -> list[list[Completion]]:
        """Continue this rank's prompts (token ids), once for each of a prompt's seeds. Collective.

        The sample for a seed must depend only on the prompt and the weights, not on other samples.

        Args:
            limits: the maximum number of new tokens for each prompt.
            greedy: always use the most probable token; log-probabilities are then those of temperature 1.
        """
        ...


class GeneratorBuilder(Protocol):
    """Builds the generator; raises a TitanError if it cannot sample from an engine with this layout."""

    def __call__(self, config: Any, *, engine: Any, tokenizer: Tokenizer) -> Generator: ...


class Reward(Protocol):
    """Rates one completion with a number; higher is better.

    A reward that raises, takes too long, or returns anything but a number counts as failed. Its weight is in
    its config, see `titancli.registry.defaults`. It may have a method `refuses(prompt) -> str | None`, which
    says why it cannot rate completions of a prompt, the same on every rank: such prompts are skipped.
    """

    def __call__(self, prompt: Prompt, completion: Completion) -> float: ...


class NoNumber(ValueError):
    """A reward returned something that is not a number."""


def number_of(value: Any) -> float:
    """Return the result of a reward as a number.

    Raises:
        NoNumber: it is not a number, or not finite.
    """
    if isinstance(value, (str, bytes)) or value is None:
        raise NoNumber(f"it returned {value!r}, which is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise NoNumber(f"it returned {number}")
    return number


class RewardBuilder(Protocol):
    def __call__(self, config: Any) -> Reward: ...


class AdvantageDefaults(Protocol):
    """Optional members of an advantage."""

    of_tokens: Callable[[list[Sample], Callable[[Tensor], Tensor]], list[Sample]] | None = None
    """For advantages per token: `of_tokens(samples, over_ranks)` returns this rank's samples of a sampling
    step with their advantages, and what else the loss reads in `extra`. The samples have the advantages that
    the call returned, and, of the weights that sampled them, `extra["old_values"]`, the values of the loss
    (`LossDefaults.values`). `over_ranks` sums a float64 tensor on the CPU over all data-parallel ranks,
    which all call it equally often, whether or not they have samples."""


class Advantage(AdvantageDefaults, Protocol):
    def __call__(self, rewards: Tensor, counted: Tensor) -> Tensor:
        """Return the advantages, [G, N] float64, of the N samples of each of the G prompts of a step, over
        all ranks; 0 for those that do not count.

        Args:
            rewards: [G, N] float64.
            counted: [G, N] bool.
        """
        ...


class AdvantageBuilder(Protocol):
    def __call__(self, config: Any) -> Advantage: ...
