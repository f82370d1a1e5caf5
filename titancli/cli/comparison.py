"""The document of `titan runs compare`, and how it is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.cli.output import note, short_path, table
from titancli.errors import UsageError, nearest_name
from titancli.terminal import printable

if TYPE_CHECKING:
    from titancli.observe.summary import Summary

ENVIRONMENT = ("host", "platform", "device", "world", "mesh", "git")
USUAL = re.compile(r"loss|validation/.*/loss")
WIDEST = 40
"""Maximum width in characters of a recipe's value; `--json` prints values whole."""


def document(runs: Sequence[Summary], names: Sequence[str], count: int) -> dict[str, Any]:
    """Return the comparison as plain JSON.

    Raises:
        UsageError: no run has logged a metric of one of these names.
        RecipeError: a lock file is not TOML.
    """
    from titancli.observe.curves import AXES, at, curve, equal_places
    from titancli.observe.events import plain
    from titancli.run.compare import side_of, spread

    sides = [side_of(run) for run in runs]
    curves = [curve(run.path / "events.jsonl") for run in runs]
    logged = sorted({name for points in curves for point in points for name in point.metrics})
    for name in names:
        if name not in logged:
            near = nearest_name(name, logged)
            hint = f"did you mean {near!r}?" if near else f"logged are: {', '.join(logged) or 'no metrics'}"
            raise UsageError(f"no run has logged a metric {name!r}", hint=hint)
    shown = list(dict.fromkeys(names)) or [name for name in logged if USUAL.fullmatch(name)]
    newest = [run.attempts[-1] if run.attempts else {} for run in runs]
    environments = [
        {**{name: attempt.get(name) for name in ENVIRONMENT}, **side.software}
        for attempt, side in zip(newest, sides, strict=True)
    ]
    equal = {}
    for axis in AXES:
        equal[axis] = [
            {"at": place, "metrics": {name: [row[name] for row in rows] for name in shown}}
            for place in equal_places(curves, axis, count)
            for rows in [[at(points, axis, place, shown) for points in curves]]
        ]
    return {
        "runs": [
            {
                "path": str(run.path),
                "state": run.state,
                "step": run.step,
                "tokens": points[-1].tokens if points else None,
                "seconds": points[-1].seconds if points else None,
                "problems": run.problems,
            }
            for run, points in zip(runs, curves, strict=True)
        ],
        "recipe": [{"key": key, "values": values} for key, values in spread([side.data for side in sides])],
        "environment": [{"key": key, "values": values} for key, values in spread(environments)],
        "equal": plain(equal),
    }


def print_comparison(found: dict[str, Any], by: str) -> None:
    """Print the comparison; each run is labelled with a letter."""
    from titancli.observe.console import duration, short

    letters = [_letter(number) for number in range(len(found["runs"]))]
    rows = []
    for letter, run in zip(letters, found["runs"], strict=True):
        tokens = "-" if run["tokens"] is None else short(run["tokens"])
        time = "-" if run["seconds"] is None else duration(run["seconds"])
        step = "-" if run["step"] is None else str(run["step"])
        rows.append(
            (letter, short_path(Path(run["path"])), run["state"].replace("_", " "), step, tokens, time)
        )
        for problem in run["problems"]:
            note(f"{letter}: {problem}")
    _print(("", "run", "state", "step", "tokens", "time"), rows)
    for title in ("recipe", "environment"):
        if changed := found[title]:
            print()
            _print((title, *letters), [(one["key"], *map(_shown, one["values"])) for one in changed])
        else:
            note(f"nothing in the {title} differs")
    places = found["equal"][by]
    if not places:
        note(f"the runs have no {by} in common at which metrics were logged")
        return
    names = list(places[0]["metrics"])
    print()
    _print(
        (by, *(f"{name} {letter}" for name in names for letter in letters)),
        [
            (_place(by, one["at"]), *(_value(name, v) for name in names for v in one["metrics"][name]))
            for one in places
        ],
    )


def _print(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with its header, on a terminal or not: its columns are not self-explanatory."""
    table(header, rows, explained=True)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"{_letter(number // 26 - 1)}{_letter(number % 26)}"


def _place(by: str, place: float) -> str:
    from titancli.observe.console import duration, short

    return str(int(place)) if by == "step" else short(place) if by == "tokens" else duration(place)


def _value(name: str, number: Any) -> str:
    from titancli.observe.console import FIGURES, UNKNOWN, value

    if number is None:
        return UNKNOWN
    of_loss = "loss" if USUAL.fullmatch(name) else name  # a held-out loss is read beside the loss
    return value({of_loss: float(number)}, of_loss) if of_loss in FIGURES else f"{float(number):.4g}"


def _shown(one: Any) -> str:
    text = "-" if one is None else printable(one if isinstance(one, str) else json.dumps(one))
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"
