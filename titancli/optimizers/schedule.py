"""The learning-rate schedule: warm-up, stable, decay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titancli.recipe.schema import LRScheduler


def lr_factor(section: LRScheduler, step: int, training_steps: int) -> float:
    """The factor on the peak learning rate at a step.

    Args:
        step: counted from 0.
        training_steps: the length of the schedule unless the section names one.

    The first step already has a learning rate, and so has the last: decay would reach its end one step later.
    """
    total, warmup, decay = section.phases(training_steps)
    if step < warmup:
        return (step + 1) / warmup
    if step < total - decay or not decay:
        return 1.0
    progress = min(1.0, (step - (total - decay)) / decay)
    if section.decay_type == "linear":
        left = 1.0 - progress
    elif section.decay_type == "sqrt":
        left = 1.0 - math.sqrt(progress)
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_lr_factor + (1.0 - section.min_lr_factor) * left
