"""The learning rate of the schedule `from_zero`, step by step as the tools compute it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan_migrate import FromZero
    from titancli.protocols import Schedule


def warmup_steps(config: FromZero, steps: int) -> int:
    """Return the steps of warm-up in a schedule of `steps` steps."""
    if config.warmup_ratio is None:
        return config.warmup_steps
    share = config.warmup_ratio * steps
    found = math.ceil(share) if config.warmup_rounding == "up" else int(share)
    found = min(found, config.warmup_limit or found)
    return 2 if found == 1 and config.warmup_rounding == "down" else found


def build(config: FromZero, *, steps: int) -> Schedule:
    """Build the schedule: `get_scheduler` of transformers, and the cosines of axolotl and torchtune."""
    warmup = warmup_steps(config, steps)
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
