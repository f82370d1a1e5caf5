"""The time of each rank's own work, so that a slow rank can be named.

All ranks end a step together, however slow one of them is: the others wait in a collective. The difference
shows at a point before which no rank has waited much: here, the time from the step's start until the loss of
the first micro-batch is known. Both points are marked without waiting for the device.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

from titancli.observe.phases import elapsed, stamp

if TYPE_CHECKING:
    import torch

KEPT = 1024
"""Steps between two readings that are measured; of more, the last ones."""
NOTICEABLE = 0.25
"""A rank slower than the others by this fraction of a step, twice in a row, is reported."""


class Pace:
    """One rank's times since they were last read."""

    def __init__(self) -> None:
        self._began: Any = None
        self._times: deque[tuple[Any, Any]] = deque(maxlen=KEPT)

    def begin(self, device: torch.device) -> None:
        """Record the start of a step."""
        self._began = stamp(device)

    def mark(self, device: torch.device) -> None:
        """Record that the first micro-batch of the step has its loss."""
        if self._began is not None:
            self._times.append((self._began, stamp(device)))
            self._began = None

    def drain(self) -> float | None:
        """Return the seconds between the two, averaged over the finished steps; None if there are none."""
        times, self._times = self._times, deque(maxlen=KEPT)
        known = [seconds for began, ended in times if (seconds := elapsed(began, ended)) is not None]
        return statistics.fmean(known) if known else None


def slowest(seconds: dict[int, float]) -> dict[str, float]:
    """Return the metrics `slow_rank` and `slow_rank_seconds`: its delay behind the median rank."""
    if len(seconds) < 2:
        return {}
    rank = max(seconds, key=lambda rank: seconds[rank])
    late = seconds[rank] - statistics.median_low(seconds.values())
    return {"slow_rank": float(rank), "slow_rank_seconds": late}


pace = Pace()
"""The process's own; `Observers` reads it."""
