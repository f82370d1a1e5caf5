"""The metric of an evaluation that callbacks compare with earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from titancli.distributed.together import Ranks
from titancli.errors import RecipeError

if TYPE_CHECKING:
    from titancli.callbacks import WatchedMetric


def value_of(name: str, metrics: Mapping[str, float]) -> float | None:
    """Return rank 0's value of a metric, on every rank; None if its dataset was not evaluated. Collective.

    Raises:
        RecipeError: its dataset was evaluated, and has other metrics.
    """
    of_dataset = [metric for metric in metrics if metric.startswith(f"{name.rpartition('/')[0]}/")]
    if of_dataset and name not in metrics:
        raise RecipeError(f"there is no metric {name!r}", hint=f"there are {', '.join(of_dataset)}")
    return Ranks().broadcast_call(f"reading {name}", lambda: metrics.get(name))


def is_better(config: WatchedMetric, value: float, best: float | None, min_delta: float = 0.0) -> bool:
    """Return whether a value improves on the best one by more than `min_delta`; NaN and infinity never do."""
    if not math.isfinite(value) or best is None:
        return math.isfinite(value)
    return (best - value if config.mode == "min" else value - best) > min_delta
