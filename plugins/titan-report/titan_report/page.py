"""The report as one HTML file that fetches no script, style, font or picture."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from titan_report import view
from titan_report.plots import COLORS, DASHES, MARGIN, label, plot
from titan_report.times import CAUSES
from titancli import __version__
from titancli.observe.console import FIGURES, duration, short
from titancli.observe.console import value as formatted
from titancli.run.compare import spread

TEMPLATE = Path(__file__).with_name("page.html")
WIDE, NARROW = (1120, 300), (400, 190)
"""Sizes in pixels: the loss on a screen; and all other plots, and the loss on a phone."""
FEW = 40
"""Maximum number of points of a curve that are marked individually."""


def html(runs: Sequence[view.Run], by: str) -> str:
    """Return the page."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    charts = [_chart(runs, name, by, number) for number, name in enumerate(view.metrics_of(runs))]
    main = [chart for chart in charts if chart["main"]]
    return template.render(
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        title=", ".join(run.name for run in runs),
        runs=[_head(run, number) for number, run in enumerate(runs)],
        facts=_facts(runs),
        main=main,
        more=[chart for chart in charts if not chart["main"]],
        axis=view.AXES[by],
        resumed=bool(_marks(runs, by)),
        margin=MARGIN,
        data=_script({chart["id"]: chart["data"] for chart in charts}),
        causes=_causes(runs),
        recipe=_differing_keys([run.side.data for run in runs]),
        environment=_environment(runs),
        checkpoints=[_checkpoints(run) for run in runs],
        attempts=[_attempts(run) for run in runs],
        evaluations=[_evaluations(run) for run in runs],
        warnings=[
            [(_clock(when), level, text) for when, level, text in run.history.messages] for run in runs
        ],
        locks=[_lock(run) for run in runs],
    )


def _script(data: Any) -> str:
    """Return JSON that is safe inside a `<script>`."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


# ---------------------------------------------------------------------------------------------- curves


def _chart(runs: Sequence[view.Run], name: str, by: str, number: int) -> dict[str, Any]:
    points = view.POINTS if name == "loss" else view.POINTS // 2
    curves = [
        one
        for index, run in enumerate(runs)
        if (one := view.curve(run, index, name, by, points)).x or one.odd
    ]
    few = all(len(one.x) <= FEW for one in curves)
    marks = _marks(runs, by)
    sizes = (WIDE, NARROW) if name == "loss" else (NARROW,)
    plots = [
        plot(curves, width=width, height=height, marks=marks, percent=name == "mfu", dots=few)
        for width, height in sizes
    ]
    return {
        "id": f"c{number}",
        "name": name,
        "title": view.title(name),
        "main": name in view.CURVES or view.is_validation_loss(name),
        "plots": plots,
        "odd": sum(len(one.odd) for one in curves),
        "beyond": ", ".join(map(label, view.limits(curves)[2])),
        "last": [
            {"color": index % COLORS, "text": _number(name, run.history.last(name))}
            for index, run in enumerate(runs)
            if run.history.last(name) is not None
        ],
        "data": {
            "name": name,
            "x": plots[0].x,
            "y": plots[0].y,
            "runs": [[one.run, _rounded(one.x), _rounded(one.y)] for one in curves],
        },
    }


def _marks(runs: Sequence[view.Run], by: str) -> list[float]:
    """Return where a run was resumed; for several runs nothing, since lines would be ambiguous."""
    if len(runs) > 1:
        return []
    history = runs[0].history
    steps, places = history.step, history.axis(by)
    return [
        float(places[bisect_right(steps, resumed) - 1])
        for resumed in history.resumed
        if steps and steps[0] <= resumed
    ]


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


# ------------------------------------------------------------------------------------------ head, facts


def _head(run: view.Run, number: int) -> dict[str, Any]:
    summary = run.summary
    done = 0.0 if not summary.steps or summary.step is None else summary.step / summary.steps
    return {
        "name": run.name,
        "color": number % COLORS,
        "dash": number // COLORS % len(DASHES),
        "state": summary.state,
        "state_text": summary.state.replace("_", " "),
        "recipe": summary.recipe,
        "step": "no step" if summary.step is None else f"{summary.step:,}",
        "steps": None if summary.steps is None else f"{summary.steps:,}",
        "progress": f"{min(1.0, done):.1%}",
        "started": _clock(summary.created),
        "error": summary.error,
        "problems": summary.problems,
    }


def _facts(runs: Sequence[view.Run]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table at the top: a name, and a text per run."""
    rows: list[tuple[str, list[str]]] = []

    def add(name: str, values: list[str]) -> None:
        if any(value != "—" for value in values):
            rows.append((name, values))

    add("Loss", [_number("loss", run.summary.metrics.get("loss")) for run in runs])
    bests = [view.best(run.history) for run in runs]
    for name in sorted({name for found in bests for name in found}, key=lambda name: (name != "loss", name)):
        title = view.title(name)
        add(f"Lowest {title[0].lower()}{title[1:]}", [_best(name, found.get(name)) for found in bests])
    tokens = [view.trained(run.history) for run in runs]
    add("Tokens", ["—" if math.isnan(one) or not one else short(one) for one in tokens])
    add("Median tokens/s", [_typical(run, "tokens_per_second") for run in runs])
    add("Median MFU", [_typical(run, "mfu") for run in runs])
    add("Peak memory", [_peak(run, "memory_gib") for run in runs])
    add("Time", [duration(run.history.times.running) for run in runs])
    skipped = [run.history.last("skipped_steps") for run in runs]
    if any(skipped):
        add("Skipped steps", ["—" if one is None else f"{one:.0f}" for one in skipped])
    if any(run.history.repeated for run in runs):
        add("Repeated steps", [f"{run.history.repeated:,}" for run in runs])
    return rows


def _best(name: str, found: dict[str, float] | None) -> str:
    return "—" if found is None else f"{found['value']:.4f} at step {found['step']:,.0f}"


def _typical(run: view.Run, name: str) -> str:
    """Return the median: a single slow step says little."""
    import numpy as np

    _, values = run.history.series(name, "step")
    values = values[np.isfinite(values)]
    return _number(name, float(np.median(values))) if len(values) else "—"


def _peak(run: view.Run, name: str) -> str:
    _, values = run.history.series(name, "step")
    return f"{_number(name, float(values.max()))} GiB" if len(values) else "—"


def _number(name: str, number: float | None) -> str:
    if number is None or name in FIGURES:
        return formatted({name: number}, name) if name in FIGURES else "—"
    return label(number)


# ------------------------------------------------------------------------------------------------ times


def _causes(runs: Sequence[view.Run]) -> dict[str, Any]:
    """Return the bars and the table of where the time went. Shares are of the time in which a run was
    active."""
    tables = [dict(run.history.times.ordered()) for run in runs]
    order = [name for run in runs for name, _ in run.history.times.ordered()]
    names = [name for name in CAUSES if name in order] + [n for n in dict.fromkeys(order) if n not in CAUSES]
    running = [run.history.times.running or 1.0 for run in runs]
    rows = [
        {
            "cause": name if name in CAUSES else "own",
            "text": CAUSES.get(name, name),
            "cells": [
                ("—", "")
                if (seconds := table.get(name)) is None
                else (_took(seconds), "" if name == "not_running" else f"{seconds / whole:.1%}")
                for table, whole in zip(tables, running, strict=True)
            ],
        }
        for name in names
    ]
    bars = [
        [
            {
                "cause": name if name in CAUSES else "own",
                "share": 100 * seconds / whole,
                "text": f"{CAUSES.get(name, name)}: {_took(seconds)}, {seconds / whole:.1%}",
            }
            for name, seconds in run.history.times.ordered()
            if name != "not_running"
        ]
        for run, whole in zip(runs, running, strict=True)
    ]
    return {"rows": rows, "bars": bars, "totals": [_took(run.history.times.wall) for run in runs]}


def _took(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 100 else duration(seconds)


# ----------------------------------------------------------------------------------------------- tables


def _differing_keys(tables: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    return [(key, [_shown(value) for value in values]) for key, values in spread(tables)]


def _environment(runs: Sequence[view.Run]) -> list[tuple[str, list[str], bool]]:
    """Return rows: a name, a text per run, and whether they differ."""
    tables = [view.environment(run) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [_shown(table.get(key)) for table in tables]) for key in keys]
    return [(key, values, len(set(values)) > 1) for key, values in rows if set(values) != {"—"}]


def _shown(value: Any) -> str:
    if value is None:
        return "—"
    if isinstance(value, dict) and value and all(isinstance(one, (int, str)) for one in value.values()):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _checkpoints(run: view.Run) -> list[tuple[str, str, str]]:
    return [
        (
            f"{one['step']:,}",
            "—" if one["time"] is None else _clock(datetime.fromtimestamp(one["time"], UTC).isoformat()),
            "" if one["kept"] else "removed",
        )
        for one in view.checkpoints(run)
    ]


def _evaluations(run: view.Run) -> list[tuple[str, str, str]]:
    return [
        (
            f"{one['step']:,}",
            one["name"],
            ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in one["metrics"].items()),
        )
        for one in run.evaluations
    ]


def _attempts(run: view.Run) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, attempt in enumerate(run.summary.attempts, 1):
        outcome = attempt.get("outcome") or {}
        why, step = outcome.get("why"), outcome.get("step")
        origin = attempt.get("checkpoint")
        rows.append(
            (
                str(number),
                _clock(attempt.get("started")),
                _clock(attempt.get("ended")),
                str(why).replace("_", " ") if why else "—",
                "—" if step is None else f"{step:,}",
                str(attempt.get("world") or "—"),
                Path(str(origin)).name if origin else "the beginning",
            )
        )
    return rows


def _clock(time: Any) -> str:
    """Return a timestamp to the minute, or a dash if there is none."""
    try:
        return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M")
    except (TypeError, ValueError):
        return "—"


def _lock(run: view.Run) -> str:
    from titancli.runs import RunFolder

    return RunFolder(run.summary.path).recipe_lock.read_text(encoding="utf-8", errors="replace")
