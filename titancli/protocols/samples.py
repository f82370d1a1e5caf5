"""Prompts, how they are continued, and their completions: plain data, torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from titancli.errors import TitanError

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The options of sampling.

    Raises:
        TitanError: one is out of its range.
    """

    max_tokens: int = 256
    """New tokens of a completion at most; fewer where the model's context leaves less room."""
    temperature: float = 1.0
    """Logits are divided by this; 0: the most probable token always."""
    top_k: int | None = None
    """Only so many most probable tokens; None: all."""
    top_p: float = 1.0
    """Nucleus: the fewest of the most probable tokens that reach this probability together."""
    stop: Sequence[str] = ()
    """Texts that end a completion, and are not part of its text."""
    stop_ids: Sequence[int] = ()
    """Tokens that end a completion, beside those of the tokenizer and the model's generation_config.json."""
    seed: int = 0
    """What is drawn follows from it, the prompt and the number of the completion."""

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
    messages: tuple[dict[str, str], ...] = ()
    """A conversation (`{"role": …, "content": …}` each), put into the tokenizer's chat template instead."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All that the task's data contain about the prompt, for rewards."""


@dataclass(frozen=True)
class Completion:
    """A model's continuation of a prompt."""

    text: str
    """The text without the end marker, and without a stop text; empty without a tokenizer."""
    tokens: list[int]
    """All tokens that were drawn, including the end marker and those that a stop text cut off."""
    logprobs: list[float]
    """log p of each token under the model itself, at whatever temperature or top-p it was drawn."""
    finish: Finish
    """Why it ended: an end marker (including `stop_ids`), a stop text, or no room."""
    version: int | None = None
    """The `Engine.version` of the weights that drew it; None if it is not known."""
