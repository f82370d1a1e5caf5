"""Where the time of a run went: each second between its first start and its end has one cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CAUSES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer, with clipping",
    "wait": "waiting for other ranks",
    "sample": "sampling",
    "reward": "rewards",
    "reference": "reference model",
    "training": "training, not divided",
    "save": "saving checkpoints",
    "evaluation": "evaluation",
    "stall": "stalls: a step took far longer than usual, in no phase",
    "start": "start: imports, model, weights",
    "restart": "restarts and resumes: the same, once more",
    "lost": "lost: steps that were done again, or never finished",
    "other": "other: Python, logging, the end",
    "not_running": "not running, between two attempts",
}
"""Causes in order; a component's own phases come before `training`, which is for logs without phases."""
MERGED = {"clip": "optimizer"}
STALL = 10.0
"""Multiple of the usual remainder of a step from which on it counts as a stall…"""
NOTICED = 0.25
"""…and the minimum in seconds."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between a logged step and the event before."""

    wall: float
    """Seconds."""
    steps: float
    save: float = 0.0
    """Seconds until a checkpoint was complete, if training waited for it."""
    evaluation: float = 0.0
    """Seconds."""
    first: bool = False
    """Whether it is the first of an attempt: compiling and warming up is not a stall."""


class Times:
    """Seconds by cause."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, cause: str, seconds: float) -> None:
        if seconds > 0:
            self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds

    @property
    def wall(self) -> float:
        """Return the seconds from the first start to the end."""
        return sum(self.seconds.values())

    @property
    def running(self) -> float:
        """Return the seconds in which an attempt was active."""
        return self.wall - self.seconds.get("not_running", 0.0)

    def ordered(self) -> list[tuple[str, float]]:
        """Return causes with their seconds, in the order of `CAUSES`."""
        own = [name for name in self.seconds if name not in CAUSES]
        names = list(CAUSES)
        names[names.index("training") : names.index("training")] = sorted(own)
        return [(name, self.seconds[name]) for name in names if name in self.seconds]

    def lose(self, interval: Interval, metrics: Mapping[str, float], kept: float) -> None:
        """Charge a row that was repeated: lost, except for a share `kept` and the saving before it."""
        phases = {name.removeprefix("time/"): value for name, value in metrics.items() if "time/" in name}
        save = min(interval.wall, max(interval.save, phases.get("save", 0.0) * interval.steps))
        rest = interval.wall - save
        self.add("save", save)
        self.add("lost", rest * (1 - kept))
        whole = sum(value for name, value in phases.items() if name != "save")
        for name, value in phases.items():
            if name != "save" and whole > 0:
                self.add(MERGED.get(name, name), rest * kept * value / whole)
        if not whole > 0:
            self.add("training", rest * kept)

    def keep(self, intervals: Sequence[Interval], metrics: Mapping[str, np.ndarray]) -> None:
        """Charge rows by their phases, and the rest. `metrics` has a value per row, by name."""
        if not intervals:
            return
        wall, steps, save, evaluation = (
            np.array([getattr(one, name) for one in intervals])
            for name in ("wall", "steps", "save", "evaluation")
        )
        first = np.array([one.first for one in intervals])
        phases = {
            name.removeprefix("time/"): values * steps
            for name, values in metrics.items()
            if name.startswith("time/")
        }
        divided = sum(phases.values(), np.zeros(len(wall))) > 0
        none = np.zeros(len(wall))
        known = {name: np.where(divided, values, 0.0) for name, values in phases.items() if name != "other"}
        # Without phases, use the events' durations of saves and evaluations.
        known["save"] = np.where(divided, known.get("save", none), save)
        known["evaluation"] = np.maximum(known.get("evaluation", none), evaluation)
        took = metrics.get("step_seconds", none) * steps
        undivided = ~divided
        known["data"] = np.where(
            divided, known.get("data", none), metrics.get("data_wait_share", none) * took
        )
        # Evaluations are not part of `step_seconds`.
        left_out = np.where(undivided & (took > 0) & (known["evaluation"] == 0), wall - took - save, 0.0)
        known["evaluation"] += np.where(left_out > NOTICED, left_out, 0.0)
        total = sum(known.values(), np.zeros(len(wall)))
        fits = np.divide(wall, total, out=np.ones(len(wall)), where=total > wall)
        known = {name: values * fits for name, values in known.items()}
        rest = np.maximum(0.0, wall - total)
        for rows, cause in ((divided, "other"), (undivided, "training")):
            usual = float(np.median((rest / steps)[rows])) * steps if rows.any() else none
            stalled = rows & ~first & (rest > STALL * usual) & (rest - usual > NOTICED)
            self.add("stall", float((rest - usual)[stalled].sum()))
            self.add(cause, float(rest[rows & ~stalled].sum() + (usual * stalled).sum()))
        for name, values in known.items():
            self.add(MERGED.get(name, name), float(values.sum()))
