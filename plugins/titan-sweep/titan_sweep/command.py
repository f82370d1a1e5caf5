"""`titan sweep RECIPE --set KEY=VALUE,VALUE`: a run for every combination of values."""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titancli.commands import (
    Common,
    NumberOrAuto,
    RecipeOrOverride,
    note,
    print_json,
    printable,
    short_path,
    split_overrides,
    table,
)
from titancli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, UsageError
from titancli.runs import RunFolder, runs_root, write_atomically

if TYPE_CHECKING:
    from titan_sweep.sweep import Job

VALIDATION = re.compile(r"validation/.*/loss")
"""Validation losses; of several datasets, the first by name is used."""
STYLES = {"finished": "green", "failed": "red", "died": "red"}


@click.command("sweep", short_help="Train every combination of some values.")
@click.argument(
    "arguments", metavar="RECIPE [KEY=VALUE]...", nargs=-1, required=True, type=RecipeOrOverride()
)
@click.option(
    "--set",
    "sets",
    metavar="KEY=V1,V2",
    multiple=True,
    required=True,
    help="The values of a key; may be repeated.",
)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Runs at the same time.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder of the runs.  [default: runs/NAME-sweep]",
)
@click.option("--nproc", type=NumberOrAuto(), help="Processes of each run.  [default: set by the launcher]")
@click.option("--dry-run", is_flag=True, help="Check all runs, show what would be done, then exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(
    common: Common,
    arguments: tuple[str, ...],
    sets: tuple[str, ...],
    jobs: int,
    folder: Path | None,
    nproc: int | str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train RECIPE with every combination of the values given with --set, each in a run folder of its own.

    All combinations are checked before the first one starts. A run that fails is tried once more. The same
    command again continues: finished runs are skipped, interrupted ones resume, failed ones are tried again.
    With --jobs, GPUs are divided among the runs.
    """
    from titan_sweep import sweep
    from titan_sweep.jobs import Jobs, shares
    from titancli.process import environment
    from titancli.recipe import load_recipe

    recipes, overrides = split_overrides(arguments)
    if len(recipes) != 1:
        raise UsageError("sweep takes one recipe", hint="titan sweep RECIPE --set KEY=VALUE,VALUE")
    combinations = sweep.combinations(sets, overrides)
    if folder is None:
        first = [one.override for one in combinations[0]]
        folder = runs_root() / f"{load_recipe(recipes[0], [*overrides, *first]).recipe.name}-sweep"
    folder = folder.absolute()
    each = shares(jobs, nproc)

    def plan() -> list[Job]:
        with environment(each[0]):
            files = common.plugin_files
            return sweep.make_jobs(recipes[0], overrides, combinations, folder, nproc, files)

    planned = plan()
    note(f"sweep: {len(planned)} run{'s' if len(planned) > 1 else ''} in {short_path(folder)}")
    if dry_run:
        _print(planned, {}, as_json=as_json, dry_run=True)
        return EXIT_OK

    def report(job: Job, code: int | None) -> None:
        if code is None:
            note(f"{job.name}: started")
            return
        result = _result(job, code)
        step = "" if result["step"] is None else f" at step {result['step']}"
        why = f": {result['error']}\n log: {short_path(job.log)}" if result["error"] else ""
        note(f"{job.name}: {result['state'].replace('_', ' ')}{step}{why}")

    hold = sweep.hold(folder)
    try:
        planned = plan()  # another sweep may have changed the folder meanwhile
        sweep.write(folder, planned)
        runner = Jobs(lambda job: _command(job, nproc, common), each, report=report)
        runner.run(planned)
    finally:
        hold.release()
    results = _print(planned, runner.codes, as_json=as_json)
    _report(folder, [job.folder.path for job in planned if RunFolder.is_run(job.folder.path)])
    return _exit_code(results, runner.received)


def _command(job: Job, nproc: int | str | None, common: Common) -> list[str]:
    from titan_sweep.jobs import titan

    plugins = [*map(str, common.plugin_files), *(f"no:{name}" for name in common.blocked)]
    return titan(
        *("train", str(job.recipe), "--run-dir", str(job.folder.path), "--resume"),
        *(() if nproc is None else ("--nproc", str(nproc))),
        *(word for plugin in plugins for word in ("-p", plugin)),
    )


def _exit_code(results: Sequence[dict[str, Any]], received: Sequence[int]) -> int:
    states = {result["state"] for result in results}
    if states <= {"finished", "data_ended"}:
        return EXIT_OK
    if received:
        return EXIT_INTERRUPTED if received[0] == signal.SIGINT else EXIT_STOPPED
    return EXIT_STOPPED if states <= {"finished", "data_ended", "stopped", "interrupted"} else EXIT_FAILED


def _print(
    jobs: Sequence[Job], codes: dict[str, int], *, as_json: bool, dry_run: bool = False
) -> list[dict[str, Any]]:
    from titancli.observe.console import value
    from titancli.observe.events import plain

    results = [_result(job, codes.get(job.name)) for job in jobs]
    if as_json:
        print_json("sweep", {"folder": str(jobs[0].folder.path.parent), "runs": plain(results)})
        return results
    validated = any(result["best_val_loss"] is not None for result in results)
    header = ["run", *(["action"] if dry_run else []), "state", "step", "loss"]
    header += [*(["best val loss"] if validated else []), "tokens/s"]
    rows = []
    for result in results:
        row = [result["name"], *([result["action"]] if dry_run else []), result["state"].replace("_", " ")]
        row.append("-" if result["step"] is None else f"{result['step']}/{result['steps'] or '-'}")
        row.append(value(result, "loss"))
        if validated:
            row.append(value({"loss": result["best_val_loss"]}, "loss"))
        rows.append([*row, value(result, "tokens_per_second")])
    table(header, rows, styles=STYLES, names=("run",), explained=True)
    return results


def _report(folder: Path, runs: Sequence[Path]) -> None:
    """Write the report of a sweep's runs, and print the command that compares them."""
    if not runs:
        return
    from titancli.observe.summary import summarize

    if len(runs) > 1:
        note(f"compare:  titan runs compare {' '.join(shlex.quote(short_path(run)) for run in runs)}")
    try:
        from titan_report import page, view

        html = page.html(view.open_runs([summarize(run) for run in runs]), "step")
        write_atomically(folder / "report.html", html)
        note(f"report:   {short_path(folder / 'report.html')}")
    except Exception as error:  # the runs matter: a failing report must not decide how a sweep ends
        note(f"there is no report: {error or type(error).__name__}")


def _result(job: Job, code: int | None) -> dict[str, Any]:
    """Return the result of a run; `code` is its command's exit code in this sweep."""
    from titancli.observe.curves import curve
    from titancli.observe.summary import summarize

    result: dict[str, Any] = {"name": job.name, "path": str(job.folder.path), "action": job.action}
    result["values"] = {setting.key: setting.value for setting in job.settings}
    failed = code not in (None, EXIT_OK, EXIT_STOPPED, EXIT_INTERRUPTED)
    if not RunFolder.is_run(job.folder.path):
        nothing = dict.fromkeys(("step", "steps", "loss", "best_val_loss", "tokens_per_second"))
        state = "failed" if failed else "not_started"
        return {**result, "state": state, **nothing, "error": _last_words(job.log) if failed else None}
    run = summarize(job.folder.path)
    losses = [
        (name, number)
        for point in curve(job.folder.events)
        for name, number in point.metrics.items()
        if VALIDATION.fullmatch(name) and number is not None and math.isfinite(number)
    ]
    first = min((name for name, _ in losses), default=None)
    unreported = failed and run.state not in ("failed", "died")
    return {
        **result,
        "state": "failed" if unreported else run.state,
        "step": run.step,
        "steps": run.steps,
        "loss": run.metrics.get("loss"),
        "best_val_loss": min((number for name, number in losses if name == first), default=None),
        "tokens_per_second": run.metrics.get("tokens_per_second"),
        "error": run.error or (_last_words(job.log) if failed else None),
    }


def _last_words(log: Path) -> str:
    """Return the last error that a command printed."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "see its log"
    errors = [line for line in lines if line.startswith("error")]
    return printable((errors or lines or ["it printed nothing"])[-1])
