"""The time of a step by phase (data, forward, backward, ...), each moment in one phase.

A nested phase counts as the outer one. On a GPU the device's own clock is used: an event is recorded on its
stream at the start and end of a phase, and read after the device has passed it. So nothing waits, and data
that arrive before the device needs them cost nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PREFIX = "time/"
OTHER = "other"
"""Time outside all phases: Python between the verbs, reading metrics, collecting garbage."""
ALWAYS = ("data", "clip", "optimizer", "save", "evaluation")
"""Reported even if they took no time."""
RAISED_IN = "titan_phase"
"""Attribute of an exception that names the innermost phase in which it was raised."""
FOLD_AT = 256
"""Events of a GPU that are kept before those that have passed are read."""


class Phases:
    """One process's clock. It runs between `start` and `stop`, in the thread that started it."""

    def __init__(self) -> None:
        self.traced = False
        """Whether a profiler is recording: each phase is then a `record_function` too."""
        self._thread: int | None = None
        self._device: torch.device | None = None
        self._name, self._depth = OTHER, 0
        self._seconds: dict[str, float] = {}
        self._since: Any = None
        self._open: deque[tuple[str, Any]] = deque()
        """A GPU's phases that have not been added up: each with the event at its end."""

    def start(self, device: torch.device) -> None:
        """Begin to count on a device; what was counted before is dropped."""
        self._thread, self._device = threading.get_ident(), device
        self._name, self._depth, self._seconds = OTHER, 0, {}
        self._open.clear()
        self._since = stamp(device)

    def stop(self) -> None:
        self._thread = None
        self._open.clear()

    @property
    def counting(self) -> bool:
        """Return whether the calling thread's time is counted."""
        return self._thread == threading.get_ident()

    def enter(self, name: str) -> None:
        self._depth += 1
        if self._depth == 1:
            self._switch(name)

    def leave(self) -> None:
        self._depth = max(0, self._depth - 1)  # a run may have begun inside of a phase
        if self._depth == 0:
            self._switch(OTHER)

    def mark(self) -> None:
        """Mark the place up to which the next `drain` counts on a GPU; the caller then waits for it."""
        if self.counting:
            self._switch(self._name)

    def drain(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, without `OTHER`; on a GPU, those up to the last
        place that the device has passed."""
        if not self.counting:
            return {}
        if self._open:
            self._fold()
        else:
            self.mark()
        seconds, self._seconds = self._seconds, {}
        seconds.pop(OTHER, None)
        return dict.fromkeys(ALWAYS, 0.0) | seconds

    def _switch(self, name: str) -> None:
        before, self._name, now = self._name, name, stamp(self._device)
        if isinstance(now, float):
            self._add(before, now - self._since)
            self._since = now
            return
        self._open.append((before, now))
        if len(self._open) >= FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        while self._open and (seconds := elapsed(self._since, self._open[0][1])) is not None:
            name, self._since = self._open.popleft()
            self._add(name, seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


class phase:
    """Count the time spent inside a `with` block as the metric `time/NAME` of the run under way.

        with phase("reward"):
            scores = [reward(sample) for sample in samples]

    Inside of another phase it counts as that one. Traces of `[profiling]` show the block under its name.
    Without a run, or in another thread than the run's, it does nothing.
    """

    __slots__ = ("_counted", "_name", "_record")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._record = None
        self._counted = phases.counting
        if self._counted:
            phases.enter(self._name)
            if phases.traced:
                self._record = _recorded(self._name)

    def __exit__(self, *error: object) -> None:
        if error[1] is not None and not hasattr(error[1], RAISED_IN):
            setattr(error[1], RAISED_IN, self._name)
        if self._record is not None:
            self._record.__exit__(*error)
        if self._counted and phases.counting:
            try:
                phases.leave()
            except Exception:
                if error[1] is None:  # else the device is lost, and what was raised first says why
                    raise


def _recorded(name: str) -> Any:
    from torch.profiler import record_function

    record = record_function(name)
    record.__enter__()
    return record


def stamp(device: Any) -> Any:
    """This moment on a device: seconds, or an event that a GPU will pass."""
    if device.type != "cuda":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(began: Any, ended: Any) -> float | None:
    """Seconds between two moments of a device; None where the later is not passed yet."""
    if isinstance(ended, float):
        return ended - began
    return began.elapsed_time(ended) / 1000 if ended.query() else None


phases = Phases()
"""The process's own; `Observers` reads it."""
