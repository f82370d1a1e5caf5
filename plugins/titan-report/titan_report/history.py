"""A run's event log, read once from beginning to end: its metrics as columns, and where its time went.

A log may have a million steps, so numbers are kept in arrays, and lines are not kept at all.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from titan_report.times import Interval, Times
from titancli.observe.console import numbers
from titancli.observe.events import can_be_shown, in_order

MESSAGES = 20
"""Maximum number of warnings and errors kept: the last ones."""
ORDERLY = ("finished", "data_ended", "stopped", "interrupted")
NAN = float("nan")


@dataclass
class Column:
    """One metric: the rows that have it, and its values."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def truncate(self, rows: int) -> None:
        end = bisect_left(self.rows, rows)
        del self.rows[end:], self.values[end:]

    def at(self, row: int) -> float:
        """Return the value of a row; NaN if it has none."""
        place = bisect_left(self.rows, row)
        return self.values[place] if place < len(self.rows) and self.rows[place] == row else NAN


class History:
    """The logged steps, without those that a later attempt repeated."""

    def __init__(self) -> None:
        self.step = array("d")
        """Step by row; the next two are by row as well."""
        self.tokens = array("d")
        """Tokens trained on so far, over all ranks; NaN if the run does not report them."""
        self.seconds = array("d")
        """Seconds of training so far, including evaluations and saves."""
        self._counted = array("d")
        """Step up to which `tokens` counts: an evaluation may have a row of its own."""
        self.columns: dict[str, Column] = {}
        self.checkpoints: dict[int, float] = {}
        """Time of completion by step (seconds since 1970)."""
        self.resumed: list[int] = []
        """Steps from which a later attempt, or the ranks after a restart, continued."""
        self.repeated = 0
        """Number of steps that were repeated."""
        self.messages: deque[tuple[str, str, str]] = deque(maxlen=MESSAGES)
        """Warnings and errors: time, level, text."""
        self.times = Times()
        self._intervals: list[Interval] = []
        self.done = 0.0
        """Step up to which there are intervals."""

    def axis(self, name: str) -> np.ndarray:
        """Return `step`, `tokens` or `seconds` by row."""
        return np.asarray(getattr(self, name))

    def series(self, name: str, by: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a metric's positions on the axis `by`, and its values; both empty if it was not logged."""
        column = self.columns.get(name, Column())
        return self.axis(by)[np.asarray(column.rows, dtype=np.int64)], np.asarray(column.values)

    def last(self, name: str) -> float | None:
        """Return a metric's last value."""
        column = self.columns.get(name)
        return column.values[-1] if column and column.values else None

    # ---------------------------------------------------------------------------------------- reading

    def add_row(self, step: int, metrics: Mapping[str, float | None], interval: Interval) -> None:
        row, before = len(self.step), self._counted[-1] if self._counted else 0.0
        rate, each = metrics.get("tokens_per_second"), metrics.get("step_seconds")
        trained = NAN if rate is None or each is None else rate * each * (step - before)
        self.tokens.append((self.tokens[-1] if self.tokens else 0.0) + trained)
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + interval.wall)
        self.step.append(step)
        self._counted.append(step)
        self._intervals.append(interval)
        self.done = step
        self.add_metrics(row, metrics)

    def add_validation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add an evaluation after a step, which may not have been logged itself."""
        if not self.step or self.step[-1] < step:
            self.step.append(step)
            self._counted.append(self._counted[-1] if self._counted else 0.0)
            self.tokens.append(self.tokens[-1] if self.tokens else 0.0)
            self.seconds.append(self.seconds[-1] if self.seconds else 0.0)
            self._intervals.append(Interval(0.0, 1.0))
        self.add_metrics(len(self.step) - 1, metrics)

    def add_metrics(self, row: int, metrics: Mapping[str, float | None]) -> None:
        for name, value in metrics.items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = Column()
            if value is not None and (not column.rows or column.rows[-1] < row):
                column.rows.append(row)
                column.values.append(value)

    def go_back(self, step: int) -> None:
        """Begin an attempt after a step: everything after that step is void, and its time lost."""
        keep = bisect_right(self.step, step)
        if keep < len(self.step):
            self.repeated += int(self.step[-1]) - step
            for row in range(keep, len(self.step)):
                interval = self._intervals[row]
                began = self.step[row] - interval.steps  # the first of them may have begun before that step
                kept = max(0.0, step - began) / interval.steps
                self.times.lose(interval, self._phases_of(row), kept)
        for values in (self.step, self.tokens, self.seconds, self._counted, self._intervals):
            del values[keep:]
        for column in self.columns.values():
            column.truncate(keep)
        for saved in [saved for saved in self.checkpoints if saved > step]:
            del self.checkpoints[saved]
        self.done = float(step)

    def _phases_of(self, row: int) -> dict[str, float]:
        found = {
            name: column.at(row)
            for name, column in self.columns.items()
            if name.startswith("time/") or name in ("data_wait_share", "step_seconds")
        }
        return {name: value for name, value in found.items() if value == value}

    def settle(self) -> None:
        """Charge the time of the remaining rows."""
        rows = len(self._intervals)
        phases = {}
        for name, column in self.columns.items():
            if name.startswith("time/") or name in ("data_wait_share", "step_seconds"):
                dense = np.zeros(rows)
                dense[np.asarray(column.rows, dtype=np.int64)] = np.nan_to_num(
                    np.asarray(column.values), nan=0.0, posinf=0.0, neginf=0.0
                )
                phases[name] = dense
        self.times.keep(self._intervals, phases)
        self._intervals = []


def read(
    path: Path,
    attempts: Sequence[Mapping[str, Any]] = (),
    *,
    until: float | None = None,
    async_saves: bool = False,
) -> History:
    """Return the history in a run's event log; for a damaged log, everything readable.

    Args:
        attempts: as in run.json: start and end of each.
        until: for a run in progress, the current time (seconds since 1970).
        async_saves: whether the recipe's checkpoints are written while training continues.
    """
    reader = _Reader(History(), attempts, async_saves)
    for event in _events(path):
        reader.take(event)
    reader.finish(until)
    reader.history.settle()
    return reader.history


def _events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from filter(can_be_shown, in_order(path))
    except OSError:
        return


class _Reader:
    """Walks along the events. Each moment between the first start and the end is charged once: `_charge`
    advances `_cursor`, and rows get the time between it and them."""

    def __init__(self, history: History, attempts: Sequence[Mapping[str, Any]], async_saves: bool) -> None:
        self.history = history
        self._attempts = attempts
        self._async_saves = async_saves
        self._number = 0
        """The current attempt, from 1; 0 before the first."""
        self._cursor: float | None = None
        self._saved_at: float | None = None
        """Time at which a checkpoint of the last row's step was complete."""
        self._evaluated = 0.0
        """Seconds of evaluations since the last row."""
        self._first = True
        """Whether the next row is the first of an attempt."""
        self._in_start = False

    def take(self, event: dict[str, Any]) -> None:
        now = seconds_of(event["time"])
        kind = event["event"]
        if now is None:
            return
        if kind != "run_start":  # an attempt may log, or fail, before its first step
            while (started := self._started(self._number)) is not None and started <= now:
                self._begin(self._number + 1, None)
        if kind == "run_start":
            self._start(event, now)
        elif kind == "step":
            self._step(event, now)
        elif kind == "validation":
            self._evaluated += event.get("seconds") or 0.0
            self.history.add_validation(event["step"], numbers(event))
        elif kind == "checkpoint":
            self.history.checkpoints[event["step"]] = now
            if self.history.step and event["step"] == self.history.step[-1] and not self._async_saves:
                self._saved_at = now
        elif kind == "log" and event["level"] not in ("info", "debug"):
            self.history.messages.append((event["time"], event["level"], event["message"]))
        elif kind == "run_end":
            self._end(now, event["why"])

    def _start(self, event: dict[str, Any], now: float) -> None:
        number = event.get("attempt")
        number = number if isinstance(number, int) else self._number
        if number != self._number or self._in_start or not self._number:
            self._begin(number, now)
        else:  # the launcher restarted the ranks
            self._charge("restart", now)
        if self.history.step or self._number > 1 or event["step"]:
            self.history.resumed.append(event["step"])
        self.history.go_back(event["step"])
        self._saved_at, self._evaluated, self._first = None, 0.0, True

    def _begin(self, number: int, now: float | None) -> None:
        """Begin the attempts up to this one; all but the last ended before their first step."""
        for each in range(self._number + 1, number + 1):
            started, ended = self._started(each - 1), self._ended(each - 2)
            if self._cursor is not None and ended is not None:
                self._leave(ended)
            elif self._saved_at is not None:  # the last known moment of a killed attempt
                self._charge("save", self._saved_at)
            self._saved_at, self._evaluated = None, 0.0
            if started is not None:
                if self._cursor is None:
                    self._cursor = started
                self._charge("not_running", started)
            self._number = each
            self._in_start = True
        if now is not None:
            self._number = max(number, 1)
            self._cursor = now if self._cursor is None else self._cursor
            self._charge("start" if self._number <= 1 else "restart", now)
            self._in_start = False

    def _step(self, event: dict[str, Any], now: float) -> None:
        history = self.history
        if event["step"] <= history.done:  # a log that lacks the start between the two
            history.go_back(event["step"] - 1)
        self._in_start = False
        cursor = self._cursor if self._cursor is not None else now
        save = max(0.0, min(self._saved_at, now) - cursor) if self._saved_at is not None else 0.0
        interval = Interval(
            wall=max(0.0, now - cursor),
            steps=max(1.0, event["step"] - history.done),
            save=save,
            evaluation=self._evaluated,
            first=self._first,
        )
        self._first = False
        history.add_row(event["step"], numbers(event), interval)
        self._cursor, self._saved_at, self._evaluated = max(now, cursor), None, 0.0

    def _end(self, now: float, why: str) -> None:
        if self._in_start:
            self._charge("start" if self._number <= 1 else "restart", now)
            self._in_start = False
            return
        if self._saved_at is not None:
            evaluated = min(self._evaluated, max(0.0, self._saved_at - (self._cursor or 0.0)))
            self._charge("evaluation", (self._cursor or 0.0) + evaluated)
            self._charge("save", self._saved_at)
        elif self._evaluated:
            self._charge("evaluation", min(now, (self._cursor or 0.0) + self._evaluated))
        self._saved_at, self._evaluated = None, 0.0
        self._charge("other" if why in ORDERLY else "lost", now)

    def _leave(self, ended: float) -> None:
        """End the previous attempt, which logged no end."""
        outcome = (self._attempts[self._number - 1].get("outcome") or {}) if self._number else {}
        self._end(ended, outcome.get("why") or "died")

    def finish(self, until: float | None) -> None:
        """Finish after the last event."""
        if len(self._attempts) > self._number:
            self._begin(len(self._attempts), None)
        ended = self._ended(len(self._attempts) - 1)
        if until is None and ended is not None:
            self._leave(ended)
        elif until is not None and self._cursor is not None:
            self._end(until, "finished")
        elif self._saved_at is not None:
            self._end(self._saved_at, "died")

    def _charge(self, cause: str, until: float) -> None:
        if self._cursor is not None and until > self._cursor:
            self.history.times.add(cause, until - self._cursor)
            self._cursor = until

    def _started(self, index: int) -> float | None:
        return self._time(index, "started")

    def _ended(self, index: int) -> float | None:
        return self._time(index, "ended")

    def _time(self, index: int, name: str) -> float | None:
        if 0 <= index < len(self._attempts):
            return seconds_of(self._attempts[index].get(name))
        return None


def seconds_of(time: Any) -> float | None:
    """Return a timestamp of run.json or events.jsonl as seconds since 1970; None if it is invalid."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError):
        return None
