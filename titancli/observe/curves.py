"""A run's metrics along its steps, its tokens and its time, from `events.jsonl`. Torch-free."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from titancli.observe.console import numbers
from titancli.observe.events import can_be_shown, read_events

AXES = ("step", "tokens", "seconds")


@dataclass(frozen=True)
class Point:
    """A logged step."""

    step: float
    tokens: float | None
    """Trained on so far, over all ranks; None if the run does not record it."""
    seconds: float
    """Spent in training up to here, evaluations and saves included; the time between two attempts is not."""
    metrics: dict[str, float | None]


def curve(path: Path) -> list[Point]:
    """Return the logged steps of an event log, in order.

    Where a later attempt went back to an earlier checkpoint, what was done after that checkpoint is left out,
    with its tokens and its time.
    """
    points: list[Point] = []
    tokens: float | None = 0.0
    step, seconds, then = 0.0, 0.0, None
    for event in filter(can_be_shown, read_events(path)):
        kind = event["event"]
        if kind == "validation":
            _add_validation(points, event, tokens)
        if kind not in ("run_start", "step"):
            continue
        now = _seconds(event["time"])
        back = kind == "run_start" or event["step"] <= step
        if back:
            limit = event["step"] if kind == "run_start" else event["step"] - 1
            points = [point for point in points if point.step <= limit]
            last = points[-1] if points else Point(event["step"] if kind == "run_start" else 0, 0.0, 0.0, {})
            step, tokens, seconds = last.step, last.tokens, last.seconds
        if kind == "step":
            metrics = numbers(event)
            rate, each = metrics.get("tokens_per_second"), metrics.get("step_seconds")
            known = (
                tokens is not None and rate is not None and each is not None and math.isfinite(rate * each)
            )
            tokens = tokens + rate * each * (event["step"] - step) if known else None  # type: ignore[operator]
            seconds += max(0.0, now - then) if then is not None and now is not None else 0.0
            step = event["step"]
            points.append(Point(step, tokens, seconds, metrics))
        then = now
    return points


def _add_validation(points: list[Point], event: dict[str, Any], tokens: float | None) -> None:
    """Add to the points the evaluations after each step."""
    last = points[-1] if points else Point(0, 0.0, 0.0, {})
    if points and last.step == event["step"]:
        points[-1] = replace(last, metrics=last.metrics | numbers(event))
    else:
        points.append(Point(event["step"], tokens, last.seconds, numbers(event)))


def equal_places(curves: Sequence[Sequence[Point]], axis: str, count: int) -> list[float]:
    """Return at most `count` places of an axis (one of `AXES`) that all curves reach, the last one included.

    Steps are those that every run logged; tokens and seconds are evenly spaced, up to where the shortest
    run ends. There are none where a run has no such places.
    """
    if axis == "step":
        common = sorted(set.intersection(*({point.step for point in points} for points in curves)))
        wanted = min(count, len(common))
        return [common[math.ceil((n + 1) * len(common) / wanted) - 1] for n in range(wanted)]
    ends = [end for points in curves if points and (end := getattr(points[-1], axis))]
    if len(ends) < len(curves):
        return []
    return [min(ends) * (n + 1) / count for n in range(count)]


def at(points: Sequence[Point], axis: str, place: float, names: Sequence[str]) -> dict[str, float | None]:
    """Return the metrics of these names that were logged last before a place, or there."""
    end = bisect_right(points, place * (1 + 1e-9), key=lambda point: getattr(point, axis))
    before = [points[n].metrics for n in range(end - 1, -1, -1)]
    return {name: next((metrics[name] for metrics in before if name in metrics), None) for name in names}


def _seconds(time: str) -> float | None:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None
