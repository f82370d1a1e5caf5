"""The content of a report as plain data: `titan report --json`, and input of the page."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_report.history import History, read
from titancli.files import read_json
from titancli.observe.events import are_metrics, plain
from titancli.observe.summary import Summary
from titancli.run.compare import Side, side_of, spread
from titancli.runs import RunFolder

ENVIRONMENT = ("host", "platform", "device", "world", "mesh", "git")
CURVES = {
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "targets_per_second": "Targets per second",
    "padding_share": "Share of padding",
    "mfu": "Model FLOPs utilization",
    "memory_gib": "Memory, GiB",
    "skipped_steps": "Skipped steps",
    "step_seconds": "Seconds per step",
}
"""Curves that every report has, if they were logged, in this order."""
HIDDEN = ("eta_seconds", "version", "slow_rank", "slow_rank_seconds", "data_wait_share", "loss_max")
POINTS = 300
"""Points per curve: longer ones are drawn as the mean, minimum and maximum of this many parts."""


@dataclass(frozen=True)
class Run:
    """One run of a report."""

    name: str
    summary: Summary
    history: History
    side: Side
    evaluations: list[dict[str, Any]]
    """Evaluations beside its checkpoints: `step`, `name`, `metrics`."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run, downsampled: `low` and `high` are the extremes of the values behind each
    point."""

    run: int
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    odd: list[float]
    """Positions where it was NaN or infinite."""


def open_runs(summaries: Sequence[Summary]) -> list[Run]:
    """Read the event logs of runs. Names are those of folders, with as much of the path as makes them unique.

    Raises:
        RecipeError: a lock file is not TOML.
    """
    names = _names([summary.path.absolute().parts for summary in summaries])
    runs = []
    for name, summary in zip(names, summaries, strict=True):
        side = side_of(summary)
        mode = (side.data.get("checkpoint") or {}).get("async_mode", "disabled")
        history = read(
            RunFolder(summary.path).events,
            summary.attempts,
            until=time.time() if summary.state == "running" else None,
            async_saves=mode != "disabled",
        )
        runs.append(Run(name, summary, history, side, evaluations(summary)))
    return runs


def _names(paths: Sequence[tuple[str, ...]]) -> list[str]:
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return names


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """Return the metrics to draw: loss, validation losses, the others of `CURVES`, all others by name."""
    logged = {name for run in runs for name, column in run.history.columns.items() if column.values}
    main = [name for name in CURVES if name in logged and _worth(runs, name)]
    validation = sorted(filter(is_validation_loss, logged))
    shown = (*CURVES, *HIDDEN, *validation)
    rest = sorted(name for name in logged if name not in shown and not name.startswith("time/"))
    return [*main[:1], *validation, *main[1:], *rest] if "loss" in main else [*validation, *main, *rest]


def title(name: str) -> str:
    """Return the title of a metric's curve: `validation/books/loss` is "Validation loss, books"."""
    parts = name.split("/", 2)
    if parts[0] == "validation" and len(parts) == 3:
        return f"Validation {parts[2].replace('_', ' ')}, {parts[1]}"
    return CURVES.get(name, name)


def is_validation_loss(name: str) -> bool:
    """Return whether a metric is the loss on held-out data."""
    return name.startswith("validation/") and name.endswith("/loss")


def _worth(runs: Sequence[Run], name: str) -> bool:
    """Return whether a metric is worth a curve: a count that stays 0 is not."""
    return name != "skipped_steps" or any(any(run.history.series(name, "step")[1]) for run in runs)


def curve(run: Run, number: int, name: str, by: str, points: int = POINTS) -> Curve:
    """Return one metric along an axis (`step`, `tokens`, `seconds`), downsampled to about `points` points."""
    x, y = run.history.series(name, by)
    x, y = x[np.isfinite(x)], y[np.isfinite(x)]
    finite = np.isfinite(y)
    odd = x[~finite]
    x, y = x[finite], y[finite]
    if len(x) > 2 * points:
        edges = np.linspace(0, len(x), points + 1).astype(int)[:-1]
        counts = np.diff(np.append(edges, len(x)))
        low, high = np.minimum.reduceat(y, edges), np.maximum.reduceat(y, edges)
        x, y = np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts
    else:
        low = high = y
    if len(odd) > points:
        odd = odd[np.linspace(0, len(odd) - 1, points).astype(int)]
    return Curve(number, x.tolist(), y.tolist(), low.tolist(), high.tolist(), odd.tolist())


def limits(curves: Sequence[Curve]) -> tuple[float, float, list[float]]:
    """Return the lowest and the highest value to show, and first values that are far beyond them.

    The first step compiles, allocates and warms up: its value may be so far from all others that they would
    look like a flat line. Only it is left out then; a spike in the middle never is.
    """
    values = [value for one in curves for value in (*one.low, *one.high)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    rest = [value for one in curves for value in (*one.low[1:], *one.high[1:])]
    if min((len(one.x) for one in curves if one.x), default=0) < FEWEST:
        return low, high, []
    least, most = min(rest), max(rest)
    if high - low <= FAR * (most - least):
        return low, high, []
    firsts = [one.y[0] for one in curves if one.x]
    room = most - least or abs(most) * 0.1
    return least, most, [value for value in firsts if not least - room <= value <= most + room]


AXES = {"step": "step", "tokens": "tokens", "seconds": "seconds of training"}
FEWEST, FAR = 5, 4
"""Minimum number of points to judge the first by; and the multiple of their range at which it is too far
away."""


def environment(run: Run) -> dict[str, Any]:
    """Return machine and versions of the newest attempt."""
    newest = run.summary.attempts[-1] if run.summary.attempts else {}
    return {**{name: newest.get(name) for name in ENVIRONMENT}, **run.side.software}


def document(runs: Sequence[Run], by: str) -> dict[str, Any]:
    """Return the report as plain JSON."""
    found = {
        "runs": [_run(run) for run in runs],
        "recipe": [{"key": key, "values": values} for key, values in spread([run.side.data for run in runs])],
        "environment": [
            {"key": key, "values": values} for key, values in spread([environment(run) for run in runs])
        ],
        "by": by,
        "curves": [
            {
                "metric": name,
                "run": number,
                **{key: getattr(one, key) for key in ("x", "y", "low", "high", "odd")},
            }
            for name in metrics_of(runs)
            for number, run in enumerate(runs)
            if (one := curve(run, number, name, by)).x or one.odd
        ],
    }
    return plain(found)


def _run(run: Run) -> dict[str, Any]:
    summary, history = run.summary, run.history
    return {
        "name": run.name,
        "path": str(summary.path.absolute()),
        "state": summary.state,
        "recipe": summary.recipe,
        "step": summary.step,
        "steps": summary.steps,
        "metrics": summary.metrics,
        "best": best(history),
        "tokens": None if math.isnan(tokens := trained(history)) else tokens,
        "wall_seconds": history.times.wall,
        "times": [{"cause": cause, "seconds": seconds} for cause, seconds in history.times.ordered()],
        "repeated_steps": history.repeated,
        "resumed_from": history.resumed,
        "checkpoints": checkpoints(run),
        "evaluations": run.evaluations,
        "warnings": [
            {"time": when, "level": level, "message": text} for when, level, text in history.messages
        ],
        "error": summary.error,
        "problems": summary.problems,
    }


def trained(history: History) -> float:
    """Return the number of tokens trained on; NaN if the run does not report them."""
    return history.tokens[-1] if history.tokens else 0.0


def best(history: History) -> dict[str, dict[str, float]]:
    """Return the lowest finite value of each loss, with its step."""
    found = {}
    for name in history.columns:
        if name == "loss" or is_validation_loss(name):
            steps, values = history.series(name, "step")
            finite = np.isfinite(values)
            if finite.any():
                place = int(np.argmin(values[finite]))
                found[name] = {"value": float(values[finite][place]), "step": float(steps[finite][place])}
    return found


def evaluations(summary: Summary) -> list[dict[str, Any]]:
    """Return the results of `titan eval` in a run folder, by step; unreadable files are added to the
    summary's problems."""
    found = []
    for path in sorted((summary.path / "evaluations").glob("step-*/*.json")):
        try:
            data = read_json(path)
            step, metrics = data["step"], data["metrics"]
            if not (isinstance(step, int) and are_metrics(metrics)):
                raise ValueError("it has no step or no metrics")
        except (OSError, ValueError, KeyError, TypeError) as error:
            where = path.relative_to(summary.path)
            summary.problems.append(f"{where} cannot be read: {type(error).__name__}: {error}")
        else:
            found.append({"step": step, "name": path.stem, "metrics": metrics})
    return sorted(found, key=lambda one: (one["step"], one["name"]))


def checkpoints(run: Run) -> list[dict[str, Any]]:
    """Return the saved steps: when (seconds since 1970; None if the log does not say), and whether the
    folder still exists."""
    here = set(run.summary.checkpoints)
    steps = sorted(here | set(run.history.checkpoints))
    return [{"step": step, "time": run.history.checkpoints.get(step), "kept": step in here} for step in steps]
