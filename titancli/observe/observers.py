"""`Observers`: a loop's reports on its steps, read rarely and passed to every logger.

A step's metrics are tensors on the device. They are kept there and read to the host every
`metrics.log_freq` steps, after the first and the last step, all in one transfer: reading is what makes the
host wait for the device.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.files import utf8
from titancli.observe.memory import memory_gib
from titancli.observe.metrics import PACE, Reading, collector, reduce_over_ranks
from titancli.observe.pace import NOTICEABLE, pace
from titancli.observe.phases import OTHER, PREFIX, phases

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

SUMMED = ("tokens", "targets", "padding", "data_wait")
"""Metrics of a step that are added up between two readings; of the others the last one counts."""


RECENT = 20
"""Readings over which the time that is left is computed, so that one slow step does not change it much."""


class Observers:
    """Hands a run's events to its loggers.

    Every rank has one and calls the same methods in the same order; `step_end` is a collective at the steps
    that are read, `run_end` where the last step is still unread.
    """

    def __init__(
        self,
        loggers: Sequence[Any],
        *,
        device: torch.device,
        log_freq: int,
        total_steps: int,
        epochs: float | None = None,
        info: Mapping[str, Any] | None = None,
        world: int = 1,
        flops_per_token: float = 0.0,
        peak_flops: float | None = None,
    ) -> None:
        """`info` goes into `run_start`. `epochs`: passes over the data in all steps, for the metric `epoch`.
        `peak_flops`: FLOP/s of one device, or None to leave MFU out."""
        self._loggers = list(loggers)
        self._device = device
        self._log_freq = log_freq
        self._total_steps, self._epochs = total_steps, epochs
        self._info = dict(info or {})
        self._world = world
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._unread: Mapping[str, Tensor | float] | None = None
        self._summed: dict[str, Any] = {}
        self._steps_since = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        """Seconds, and steps, of the last readings."""
        self._read_at = time.perf_counter()
        self._evaluated: Mapping[str, Tensor | float] = {}
        self._evaluation_seconds = 0.0
        self._validated: dict[str, float] = {}
        self._first = True
        self._ended = False
        self._slow: float | None = None
        self._named: set[float | None] = set()
        self.step = 0
        """The last step that ended."""
        self.latest: dict[str, float] = {}
        """The metrics that were read last."""

    def run_start(self, info: Mapping[str, Any]) -> None:
        """Announce the run, before its first step. `info` adds to what the constructor was given."""
        collector.drain()
        pace.drain()
        phases.start(self._device)
        merged = utf8({**self._info, **info})  # the stores of loggers are UTF-8, and arguments need not be
        self.step = int(merged.get("step") or 0)
        self._read_at = time.perf_counter()
        self._notify_all("run_start", merged)

    def step_end(self, step: int, metrics: Mapping[str, Tensor | float]) -> None:
        """Record a step. Values are global already; 0-dim tensors are read only if the step is logged.

        `tokens`, `targets` and `padding` (of this step, over all ranks; `titancli.protocols.batch.Counts`)
        give the throughput, and the padding's share of all positions; `data_wait` (seconds this step waited
        for data) its share of the time.
        """
        self.step = step
        self._unread = metrics
        self._steps_since += 1
        for name in SUMMED:
            if name in metrics:
                self._summed[name] = self._summed.get(name, 0.0) + metrics[name]
        due = step % self._log_freq == 0 or step >= self._total_steps
        if self._evaluated:
            self._unread = {**metrics, **self._evaluated}
        if self._first or due or self._evaluated:
            self._read(step)

    def evaluated(self, metrics: Mapping[str, Tensor | float], seconds: float) -> None:
        """Record an evaluation after the step under way: its metrics appear with the step's, and its time
        counts for no step."""
        self._evaluated = metrics
        self.pause(seconds)

    def validated(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Record an evaluation between two steps; its time counts for no step. A logger without a method for
        it gets the metrics as a step's."""
        self.pause(seconds)
        self._validated = dict(metrics)
        self.latest = {**self.latest, **metrics}
        for one in list(self._loggers):
            if hasattr(one, "validated"):
                self._notify(one, "validated", step, dict(metrics), seconds)
            else:
                self._notify(one, "step_end", step, dict(metrics))

    def pause(self, seconds: float) -> None:
        """Leave this much time since the last reading out of the steps' time."""
        self._evaluation_seconds += seconds
        self._read_at += seconds

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """Announce a complete checkpoint. May be called from another thread than the rest."""
        self._notify_all("checkpoint_saved", step, path)

    def run_end(self, outcome: dict[str, Any]) -> None:
        """Announce the end of a run that did not fail. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if self._unread is not None:
            self._read(self.step)
        phases.stop()
        self._notify_all("run_end", {**outcome, "metrics": {**self.latest, **(outcome.get("metrics") or {})}})

    def _read(self, step: int) -> None:
        readings = collector.drain()
        values = {name: value for name, value in (self._unread or {}).items() if name not in SUMMED}
        self._unread, self._evaluated = None, {}
        phases.mark()  # the device has passed it once the metrics are here
        metrics = self._to_host(values, readings)
        now = time.perf_counter()
        if (own := pace.drain()) is not None:
            readings[PACE] = Reading("max", own)
        readings["memory_gib"] = Reading("max", memory_gib(self._device))
        elapsed, steps = now - self._read_at, self._steps_since
        if "data_wait" in self._summed:
            readings["data_wait_share"] = Reading("max", min(1.0, self._summed["data_wait"] / elapsed))
        readings |= self._times(elapsed + self._evaluation_seconds, steps)
        metrics |= self._speed(step, elapsed, steps)
        if self._epochs is not None:
            metrics["epoch"] = self._epochs * step / self._total_steps
        metrics |= reduce_over_ranks(readings)
        self._watch(metrics)
        self._read_at, self._steps_since, self._summed, self._first = now, 0, {}, False
        self._evaluation_seconds = 0.0
        self.latest = {**metrics, **self._validated}
        self._notify_all("step_end", step, metrics)

    def _times(self, elapsed: float, steps: int) -> dict[str, Reading]:
        """Seconds of a step by phase, the mean over the ranks, which add up to `elapsed` over the steps."""
        seconds = phases.drain()
        if seconds:
            seconds[OTHER] = max(0.0, elapsed - sum(seconds.values()))
        share = 1 / (max(steps, 1) * self._world)
        # Sums, not means: a rank that was not in a phase counts as 0.
        return {f"{PREFIX}{name}": Reading("sum", value * share) for name, value in seconds.items()}

    def _watch(self, metrics: dict[str, float]) -> None:
        """Name a rank that the others wait for."""
        rank, late = metrics.get("slow_rank"), metrics.get("slow_rank_seconds", 0.0)
        before, self._slow = self._slow, rank if late > NOTICEABLE * metrics["step_seconds"] else None
        if self._slow is not None and self._slow == before and rank not in self._named:
            self._named.add(rank)
            logger.warning("rank %d is slower than the others by %.0f ms per step", rank, 1000 * late)

    def _to_host(self, values: dict[str, Any], readings: dict[str, Reading]) -> dict[str, float]:
        """Read every tensor of these in one transfer: returns `values`, and changes the others in place."""
        import torch

        holders: list[tuple[dict[str, Any] | Reading, str]] = [(values, name) for name in values]
        holders += [(self._summed, name) for name in self._summed]
        holders += [(reading, part) for reading in readings.values() for part in ("value", "count")]
        tensors = []
        for holder, name in holders:
            value = holder[name] if isinstance(holder, dict) else getattr(holder, name)
            tensors.append(value.detach() if isinstance(value, torch.Tensor) else None)
        on_device = [t.to(self._device, torch.float64).reshape(()) for t in tensors if t is not None]
        numbers = iter(torch.stack(on_device).tolist() if on_device else [])
        for (holder, name), tensor in zip(holders, tensors, strict=True):
            if tensor is None:
                continue
            if isinstance(holder, dict):
                holder[name] = next(numbers)
            else:
                setattr(holder, name, next(numbers))
        return {name: float(value) for name, value in values.items()}

    def _speed(self, step: int, elapsed: float, steps: int) -> dict[str, float]:
        """Return throughput, utilisation and remaining time, from the time since the last reading."""
        speed = {"step_seconds": elapsed / max(steps, 1)}
        if targets := self._summed.get("targets"):
            speed["targets_per_second"] = targets / elapsed
            padding = self._summed.get("padding", 0)
            speed["padding_share"] = padding / (self._summed["tokens"] + padding)
        if "tokens" in self._summed:
            rate = self._summed["tokens"] / elapsed
            speed["tokens_per_second"] = rate
            if self._peak_flops and self._flops_per_token:
                speed["mfu"] = self._flops_per_token * rate / (self._peak_flops * self._world)
        if not self._first:  # the first step compiles and warms up: no measure of the others
            self._recent.append((elapsed, max(steps, 1)))
            seconds = sum(taken for taken, _ in self._recent) / sum(count for _, count in self._recent)
            speed["eta_seconds"] = max(0, self._total_steps - step) * seconds
        return speed

    def _notify_all(self, method: str, *arguments: Any) -> None:
        for one in list(self._loggers):
            self._notify(one, method, *arguments)

    def _notify(self, one: Any, method: str, *arguments: Any) -> None:
        call = getattr(one, method, None)
        if call is None:
            return
        try:
            call(*arguments)
        except Exception as error:
            self._loggers.remove(one)
            logger.warning(
                "logger %s failed in %s and is disabled: %s: %s",
                type(one).__qualname__,
                method,
                type(error).__name__,
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
