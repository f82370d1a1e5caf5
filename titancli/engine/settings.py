"""What an engine is told of its recipe, and what it tells of itself: plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from titancli.data.values import Limits


class Status(TypedDict):
    """Where an engine stands: plain numbers, the same on every rank."""

    step: int
    """Optimizer steps done, skipped ones included."""
    version: int
    """Counts the changes of the weights: it differs whenever they may."""
    accumulated: int
    """Micro-batches whose gradients wait for `optim_step`."""
    tokens_seen: int
    """Input tokens of all steps, over all ranks."""


@dataclass(frozen=True)
class EngineSettings:
    """What the verbs need to know of a recipe."""

    seed: int
    max_norm: float
    """Gradients are clipped to it; 0: never."""
    accumulation: int
    """Micro-batches in one step, for the loop."""
    lr_factor: Callable[[int], float]
    """What the peak learning rate is multiplied by at a step, counted from 0."""
    limits: Limits = Limits()  # noqa: RUF009 - a tuple
    """What a batch may hold."""
