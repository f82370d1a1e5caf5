"""`report`: any component may report a number by name, without knowing who logs it.

What is reported between two readings is folded into one number a name on each rank, without waiting for the
device, and over all ranks when the run reads its metrics.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titancli.errors import TitanError
from titancli.files import utf8
from titancli.observe.pace import slowest

if TYPE_CHECKING:
    from torch import Tensor

Reduce = Literal["mean", "max", "sum"]
PACE = "slow_rank"
"""The metric that is kept per rank, see `titancli.observe.pace`."""


@dataclass
class Reading:
    """The reports of one rank under one name since the last reading."""

    reduce: Reduce
    value: Any
    """The sum of the reports, or their maximum; a float, or a 0-dim tensor until it is read."""
    count: Any = 1
    """The divisor of the mean; a number, or a 0-dim tensor until it is read."""


class Collector:
    """Folds reports until they are read. Any thread may report."""

    def __init__(self) -> None:
        self._readings: dict[str, Reading] = {}
        self._mutex = threading.Lock()
        self._thread = threading.local()

    @property
    def is_muted(self) -> bool:
        return getattr(self._thread, "muted", False)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Ignore this thread's reports: an evaluation must not be mistaken for training."""
        before, self._thread.muted = self.is_muted, True
        try:
            yield
        finally:
            self._thread.muted = before

    @contextmanager
    def captured(self) -> Iterator[Collector]:
        """Collect this thread's reports separately, in the dict that is yielded."""
        before, own = getattr(self._thread, "captured", None), Collector()
        self._thread.captured = own
        try:
            yield own
        finally:
            self._thread.captured = before

    def add(self, name: str, value: Tensor | float, reduce: Reduce, count: Tensor | float = 1) -> None:
        if reduce not in ("mean", "max", "sum"):
            raise TitanError(f"report({name!r}): reduce is 'mean', 'max' or 'sum', not {reduce!r}")
        if utf8(name) != name:
            raise TitanError(f"report({name!a}): the name is not valid UTF-8, and loggers cannot store it")
        detached: Any = value.detach() if hasattr(value, "detach") else float(value)
        if getattr(detached, "ndim", 0) != 0:
            raise TitanError(
                f"report({name!r}): a metric must be one number, not a tensor of shape {list(detached.shape)}"
            )
        if self.is_muted:
            return
        if (captured := getattr(self._thread, "captured", None)) is not None:
            captured.add(name, value, reduce, count)
            return
        with self._mutex:
            self._fold(name, detached, reduce, count)

    def _fold(self, name: str, detached: Any, reduce: Reduce, count: Any) -> None:
        reading = self._readings.get(name)
        if reading is None:
            # A copy: what was reported may be changed in place before it is read.
            copies = (part.clone() if hasattr(part, "clone") else part for part in (detached, count))
            self._readings[name] = Reading(reduce, *copies)
            return
        if reading.reduce != reduce:
            raise TitanError(
                f"metric {name!r} is reported with reduce={reduce!r} and with reduce={reading.reduce!r}",
                hint="rename one of them",
            )
        reading.value = _maximum(reading.value, detached) if reduce == "max" else reading.value + detached
        reading.count = reading.count + count

    def drain(self) -> dict[str, Reading]:
        """Return everything reported since the last call, by name."""
        with self._mutex:
            readings, self._readings = self._readings, {}
        return readings


def _maximum(a: Any, b: Any) -> Any:
    if hasattr(a, "maximum"):
        return a.maximum(b if hasattr(b, "detach") else a.new_tensor(b))
    if hasattr(b, "maximum"):
        return b.maximum(b.new_tensor(a))
    return _largest([a, b])


def _largest(values: list[float]) -> float:
    """Return the maximum, or NaN if one of them is: max() would lose one that is not the first."""
    return next((value for value in values if value != value), max(values))


collector = Collector()
"""The process's own; `Observers` reads it."""


def report(name: str, value: Tensor | float, *, reduce: Reduce = "mean", count: Tensor | float = 1) -> None:
    """Report a metric from anywhere in a run: a float, or a 0-dim tensor, which is not waited for.

    It appears under `name` in all loggers: as the mean or the maximum of all reports of all ranks since the
    last reading (every `metrics.log_freq` steps), or as their sum, to which every rank that reports adds.
    With `count`, the value is the sum of `count` numbers whose mean is reported; nothing is reported
    for 0 numbers.

    Raises:
        TitanError: not one number, or a name that is reported with two reductions.
    """
    collector.add(name, value, reduce, count)


def reduce_over_ranks(readings: Mapping[str, Reading]) -> dict[str, float]:
    """Reduce each name to one number over all ranks; a name that only some ranks report counts only these.

    Values must be floats by now. A collective on the CPU, where a process group is up with several ranks;
    the result is the same on every rank.
    """
    from titancli.distributed.together import Ranks

    local = {
        name: (reading.reduce, float(reading.value), float(reading.count))
        for name, reading in readings.items()
    }
    gathered = Ranks().gather(local)
    merged: dict[str, list[tuple[Reduce, float, float]]] = {}
    for by_name in gathered:
        for name, reading in by_name.items():
            merged.setdefault(name, []).append(reading)
    paces = {rank: by_name[PACE][1] for rank, by_name in enumerate(gathered) if PACE in by_name}
    merged.pop(PACE, None)
    empty = [name for name, parts in merged.items() if not sum(count for _, _, count in parts)]
    folded = {name: _fold(parts) for name, parts in sorted(merged.items()) if name not in empty}
    return folded | slowest(paces)


def _fold(parts: list[tuple[Reduce, float, float]]) -> float:
    reduce = parts[0][0]
    if reduce == "max":
        return _largest([value for _, value, _ in parts])
    total = sum(value for _, value, _ in parts)
    return total if reduce == "sum" else total / sum(count for _, _, count in parts)
