"""`titan profile RUN`: traces of the next steps of a run under way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from titancli.cli.completion import RunName
from titancli.cli.output import note, out, print_json, short_path
from titancli.errors import EnvironmentProblem, TitanError

OTHERS = 30.0
"""Seconds to wait for the other ranks' traces after rank 0 has written its own."""


@click.command("profile", short_help="Record traces of the next steps of a running run.")
@click.argument("run", type=RunName())
@click.option("--steps", type=click.IntRange(1, 20), default=3, show_default=True, help="Steps to record.")
@click.option("--memory", is_flag=True, help="Also take a memory snapshot (CUDA).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, steps: int, memory: bool, as_json: bool) -> None:
    """Record a trace of the next steps of RUN, while it is running, and print the files.

    All ranks start at the same step, after `profiling.profiler_warmup` steps. `profiling.ranks` says which
    of them record. Ctrl-C takes the request back if the run has not seen it yet.
    """
    from titancli.observe.profile_request import Wish, ask, withdraw
    from titancli.observe.summary import summarize
    from titancli.runs import RunFolder

    folder = RunFolder.open(run)
    found = summarize(folder.path)
    if found.state == "unknown":
        raise EnvironmentProblem(
            f"{run} was started on {found.attempts[-1].get('host') if found.attempts else 'another host'}, "
            "and this machine cannot see whether it is running",
            hint="run this command on that machine",
        )
    if found.state != "running":
        raise EnvironmentProblem(
            f"{run} is not running: its state is {found.state}",
            hint=f"record traces from the start: titan train {run} --resume profiling.enable_profiling=true",
        )
    name = ask(folder.path, Wish(steps, memory))
    note("trace requested; recording begins at one of the next steps")
    try:
        answer = _answered(folder, name)
    except BaseException:
        withdraw(folder.path, name)
        raise
    traces = _written(Path(answer["traces"]), "json.gz", answer["ranks"])
    snapshots = _written(Path(answer["snapshots"]), "pickle", answer["ranks"]) if answer["snapshots"] else []
    if memory and not snapshots:
        note("no memory snapshot: there are none on a CPU, only of the CUDA allocator")
    if as_json:
        known = {key: answer[key] for key in ("first_step", "last_step")}
        print_json("profile", {**known, "traces": traces, "snapshots": snapshots})
        return
    for file in [*traces, *snapshots]:
        out(short_path(Path(file)))
    note("open traces in https://ui.perfetto.dev or chrome://tracing")
    if snapshots:
        note("open memory snapshots in https://docs.pytorch.org/memory_viz")


def _answered(folder: Any, name: str) -> dict[str, Any]:
    """Return the run's answer once it has recorded.

    Raises:
        TitanError: the run could not record, or ended first.
    """
    from titancli.observe.profile_request import answer_to

    announced = False
    while True:
        running = folder.in_use()  # before the answer: the last one may come with the run's end
        answer = answer_to(folder.path, name)
        if answer is not None and answer["state"] == "done":
            return answer
        if answer is not None and answer["state"] == "failed":
            raise TitanError(f"{folder.path} could not write a trace: {answer['reason']}")
        if running is False:
            raise TitanError(f"{folder.path} ended before the trace was recorded")
        if answer is not None and not announced:
            announced = True
            note(f"recording steps {answer['first_step']} to {answer['last_step']}")
        time.sleep(0.2)


def _written(folder: Path, ending: str, ranks: list[int]) -> list[str]:
    """Return the files of these ranks, which may appear a little later than rank 0's."""
    until = time.monotonic() + OTHERS
    missing = list(ranks)
    while True:
        missing = [rank for rank in missing if not (folder / f"rank-{rank}.{ending}").exists()]
        if not missing or time.monotonic() > until:
            break
        time.sleep(0.2)
    for rank in missing:
        note(f"rank {rank} has written nothing to {folder}; see logs/rank-{rank}.log")
    return [str(folder / f"rank-{rank}.{ending}") for rank in ranks if rank not in missing]
