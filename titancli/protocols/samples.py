"""Prompts and their completions: plain data, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Finish = Literal["eos", "stop", "length"]


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
    """All that the task's data say of it, for rewards."""


@dataclass(frozen=True)
class Completion:
    """A model's continuation of a prompt."""

    text: str
    """Without the end marker, and without a stop text."""
    tokens: list[int]
    """All that were drawn, the end marker and what a stop text cut off included."""
    logprobs: list[float]
    """log p of each of them under the model itself, whatever temperature or top-p they were drawn with."""
    finish: Finish
    """The model's end marker, a stop text, or no room."""
