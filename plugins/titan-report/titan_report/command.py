"""`titan report`: one page about one or more runs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from titancli.commands import RunName, colored, print_json, printable, short_path, table
from titancli.errors import EnvironmentProblem, UsageError
from titancli.runs import RunFolder, write_atomically

if TYPE_CHECKING:
    from titan_report.view import Run

MARK = '<meta name="generator" content="titan report'
TEXT = ("loss", "grad_norm", "lr", "tokens_per_second")
"""Curves drawn by --text, besides those of validation."""
COLORS = ("36", "33", "32", "35", "34", "31")
"""Colors of runs in a terminal."""


@click.command("report", short_help="Write a report of runs as one HTML page.")
@click.argument("runs", metavar="RUN [RUN]...", nargs=-1, required=True, type=RunName())
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write.  [default: report.html]",
)
@click.option(
    "--by",
    type=click.Choice(["step", "tokens", "seconds"]),
    default="step",
    show_default=True,
    help="The horizontal axis of curves: steps, tokens, or seconds of training.",
)
@click.option("--text", is_flag=True, help="Draw the main curves in the terminal instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
def command(runs: tuple[Path, ...], output: Path | None, by: str, text: bool, as_json: bool) -> None:
    """Write one HTML page about RUNs: curves, time spent, checkpoints, environment; for several runs also the
    differences between their recipes.

    The page is a single file that loads nothing from elsewhere. Runs may still be in progress.
    """
    from titan_report import view
    from titancli.observe.summary import summarize

    if text + as_json + (output is not None) > 1:
        raise UsageError("--text, --json and -o exclude each other")
    paths = list(dict.fromkeys(RunFolder.open(run).path for run in runs))
    if not (text or as_json):
        output = output or Path("report.html")
        _refuse_foreign(output)
    found = view.open_runs([summarize(path) for path in paths])
    if as_json:
        print_json("report", view.document(found, by))
    elif output is None:
        _print(found, by)
    else:
        from titan_report import page

        write_atomically(output, page.html(found, by))
        print(short_path(output.absolute()))


def _refuse_foreign(output: Path) -> None:
    """Check that the file may be written.

    Raises:
        EnvironmentProblem: it exists and is not a report, or its folder does not exist.
    """
    if not output.absolute().parent.is_dir():
        raise EnvironmentProblem(f"folder {output.absolute().parent} does not exist")
    if output.exists() and MARK not in output.read_text(encoding="utf-8", errors="replace")[:1000]:
        raise EnvironmentProblem(
            f"{output} exists and is not a report of titan", hint="choose another file with -o FILE"
        )


def _print(runs: Sequence[Run], by: str) -> None:
    from titan_report import text, view
    from titan_report.plots import label
    from titan_report.times import CAUSES
    from titancli.observe.console import duration

    columns = min(shutil.get_terminal_size().columns, 100)
    for number, run in enumerate(runs):
        summary = run.summary
        step = "no step" if summary.step is None else f"step {summary.step}/{summary.steps}"
        mark = f"{'━' if _in_color() else _letter(number)} " if len(runs) > 1 else ""
        name = _colored(f"{mark}{printable(run.name)}", number if len(runs) > 1 else None)
        error = f": {printable(summary.error)}" if summary.error else ""
        print(f"{name}  {summary.state.replace('_', ' ')}, {step}{error}")
    for name in view.metrics_of(runs):
        if name not in TEXT and not view.is_validation_loss(name):
            continue
        curves = [view.curve(run, number, name, by, 2 * columns) for number, run in enumerate(runs)]
        if lines := text.chart(curves, width=columns, height=9 if name == "loss" else 6):
            beyond = view.limits(curves)[2]
            firsts = f" (first, beyond the axis: {', '.join(map(label, beyond))})" if beyond else ""
            print(f"\n{printable(view.title(name))} by {by}{firsts}")
            for line in lines:
                print("".join(_piece(piece, run, len(runs)) for piece, run in line).rstrip())
    print(f"\nacross: {view.AXES[by]}; a curve of many points spans their minimum and maximum")
    tables = [dict(run.history.times.ordered()) for run in runs]
    names = dict.fromkeys(cause for run in runs for cause, _ in run.history.times.ordered())
    rows = []
    for cause in names:
        cells = []
        for run, seconds in zip(runs, (one.get(cause) for one in tables), strict=True):
            share = (
                "" if cause == "not_running" else f" {(seconds or 0) / (run.history.times.running or 1):.1%}"
            )
            cells.append("-" if seconds is None else f"{duration(seconds)}{share}")
        rows.append((CAUSES.get(cause, cause), *cells))
    if rows:
        print("\nwhere the time went")
        table(("cause", *(run.name for run in runs)), rows)


def _piece(text: str, run: int | None, runs: int) -> str:
    """Return a piece of a chart, in the color of its run, or without colors, as the run's letter."""
    if run is None or _in_color():
        return _colored(text, run)
    return _letter(run) if runs > 1 else text


def _letter(run: int) -> str:
    return chr(ord("A") + run % 26)


def _in_color() -> bool:
    return colored(sys.stdout) and not os.environ.get("NO_COLOR")


def _colored(text: str, run: int | None) -> str:
    plain = run is None or not _in_color()
    return text if plain else f"\x1b[{COLORS[run % len(COLORS)]}m{text}\x1b[0m"  # type: ignore[operator]
