"""Prompts, sampling options, completions, and samples to learn from: plain data without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from titancli.errors import TitanError

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

    Numbers = Sequence[float] | ndarray[Any, Any] | Tensor

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The options of sampling.

    Raises:
        TitanError: one is out of its range.
    """

    max_tokens: int = 256
    """Maximum number of new tokens per completion; less if the model's context leaves less room."""
    temperature: float = 1.0
    """Divisor of the logits; 0: always the most probable token."""
    top_k: int | None = None
    """Sample from this many most probable tokens; None: from all."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the smallest set of most probable tokens with this cumulative
    probability."""
    stop: Sequence[str] = ()
    """Stop texts, which end a completion and are not part of its text."""
    stop_ids: Sequence[int] = ()
    """Stop tokens, in addition to those of the tokenizer and the model's generation_config.json."""
    seed: int = 0
    """Seed; a completion depends only on it, the prompt and the number of the completion."""
    routes: bool = False
    """Record the experts that each token visits, as `Completion.routes`."""

    def __post_init__(self) -> None:
        def whole(value: Any, least: int) -> bool:
            return type(value) is int and value >= least

        temperature, top_p = self.temperature, self.top_p
        for name, fits, range_ in (
            ("max_tokens", whole(self.max_tokens, 1), "an integer of 1 or more"),
            ("temperature", 0 <= temperature < math.inf, "0 (the most probable) or more"),
            ("top_k", self.top_k is None or whole(self.top_k, 1), "an integer of 1 or more, or None for all"),
            ("top_p", 0 < top_p <= 1, "above 0 and at most 1"),
            (
                "stop",
                _all(self.stop, lambda one: isinstance(one, str) and one),
                "a list of texts, none empty",
            ),
            ("stop_ids", _all(self.stop_ids, lambda one: whole(one, 0)), "a list of token ids"),
            ("seed", whole(self.seed, 0), "an integer of 0 or more"),
            ("routes", isinstance(self.routes, bool), "true or false"),
        ):
            if not fits:
                raise TitanError(f"sampling: {name} is {getattr(self, name)!r}", hint=f"it is {range_}")


def _all(values: Any, fits: Any) -> bool:
    return not isinstance(values, str) and all(map(fits, values))


@dataclass(frozen=True)
class Prompt:
    """A task's prompt."""

    text: str
    """The text to continue; with `messages` their readable form."""
    answer: str | None = None
    """The right answer, if the task knows it."""
    messages: tuple[dict[str, Any], ...] = ()
    """A conversation (`{"role": …, "content": …}` each), put into the tokenizer's chat template instead."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The complete row of the task's data, for rewards."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the chat template for `messages`, such as `tools`."""


@dataclass(frozen=True)
class Completion:
    """A model's continuation of a prompt."""

    text: str
    """The text without the end marker, and without a stop text; empty without a tokenizer."""
    tokens: list[int]
    """All sampled tokens, including the end marker and tokens cut off by a stop text."""
    logprobs: list[float]
    """The log-probability of each token under the model at the sampling temperature, before top-k and top-p;
    with temperature 0 at temperature 1."""
    finish: Finish
    """Why it ended: an end marker (including `stop_ids`), a stop text, or the length limit."""
    version: int | None = None
    """The `Engine.version` of the weights that sampled it; None if unknown."""
    routes: ndarray[Any, Any] | None = field(default=None, compare=False, repr=False)
    """The experts that each token visited, [tokens, layers, top_k] uint8, or int16 for more than 256 experts:
    of the prompt and the completion, except its last token, which no model has read. None: not recorded."""


@dataclass(frozen=True)
class Sample:
    """A text to learn from, or to score, as a list of token ids.

    Lists have one entry per token. The entry at t belongs to `tokens[t]` as a target, which a model predicts
    from the tokens before it. Entries where the mask is 0 are not read. The engine checks samples when they
    are passed to it.
    """

    tokens: Sequence[int] | ndarray[Any, Any] | Tensor
    """The whole text, not shifted: prompt, turns, tool results, completion."""
    mask: Numbers
    """The weight of each token as a target, at least 0; 0 for text that the model did not write. The first
    entry is not read, because no token precedes it."""
    logprobs: Numbers | None = None
    """Log-probabilities of the tokens, in nats, under the weights that sampled them."""
    advantages: float | Numbers = 0.0
    """The advantage of all tokens, or of each."""
    reference: Numbers | None = None
    """Log-probabilities of the tokens, in nats, under a reference model."""
    routes: Any = None
    """The experts that tokens visit in place of those that the model's routers would choose, integers
    [tokens, layers, top_k]. Unlike the others, the entry at t belongs to `tokens[t]` as an input. -1, and the
    tokens after the last entry: the router's own choice. None: its own for all."""
    extra: Mapping[str, float | Numbers] = field(default_factory=dict)
    """Other values that a loss reads, by their names in the batch: one number for all tokens, or one for
    each."""

    @classmethod
    def of(cls, prompt: Sequence[int], completion: Completion, advantage: float = 0.0) -> Self:
        """Return a sample made from a completion of a prompt."""
        given, drawn = [0.0] * len(prompt), len(completion.tokens)
        return cls(
            tokens=[*prompt, *completion.tokens],
            mask=[*given, *([1.0] * drawn)],
            logprobs=[*given, *completion.logprobs],
            advantages=advantage,
            routes=completion.routes,
        )
