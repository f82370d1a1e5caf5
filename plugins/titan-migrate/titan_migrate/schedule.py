"""The learning rate of the schedule `from_zero`, step by step as the tools compute it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titancli.protocols import Schedule


def build(config: Any, *, steps: int) -> Schedule:
    """Build the schedule of a `FromZero`: `get_scheduler` of transformers, the cosines of axolotl and
    torchtune."""
    warmup = config.warmup(steps)
    end = steps if config.decay_until == 1 else int(steps * config.decay_until)

    def factor(step: int) -> float:
        if step < warmup:
            return float((step / warmup) ** config.warmup_power)
        if config.shape == "constant":
            return 1.0
        if config.shape == "inverse_sqrt":  # transformers' timescale is the warm-up, or 10,000 steps
            shift = (warmup or 10_000) - warmup
            return 1.0 / math.sqrt((step + shift) / (warmup or 10_000))
        progress = (min(step, end) - warmup) / max(1, end - warmup)
        if config.shape == "linear":
            return max(0.0, 1.0 - progress)
        left = max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        return (1.0 - config.min_lr_factor) * left + config.min_lr_factor

    return factor
