"""`titan runs …`: list, show, watch, compare and remove runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titancli.cli.completion import RunName
from titancli.cli.output import note, out, print_json, short_path, table
from titancli.errors import UsageError
from titancli.runs import RunFolder, runs_root
from titancli.terminal import printable

if TYPE_CHECKING:
    from titancli.observe.summary import Summary

RUN = RunName()
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
STYLES = {"running": "bold green", "failed": "red", "died": "red", "closing": "yellow", "unknown": "yellow"}
LOOK_BACK = 200
"""Number of events before the last step that are searched for an evaluation."""
DAY = 86400


@click.group("runs", short_help="List, show, watch, compare and remove runs.")
def command() -> None:
    """List, show, watch, compare and remove runs.

    RUN is a run folder. A run is `running` while a process holds its folder; `died` means that it was killed
    before it could record an outcome, `closing` that its last step is done and a resume does what is left,
    and `unknown` that this cannot be seen from this machine.
    """


@command.command("list", short_help="List runs, the newest last.")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--sort", metavar="KEY", help="The order: name, step, recipe, loss, …  [default: created]")
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="The N newest, or first by --sort.")
@click.option(
    "--filter",
    "conditions",
    metavar="CONDITION",
    multiple=True,
    help="Only runs of which it is true; may be repeated.",
)
@JSON
def list_(
    folder: Path | None,
    sort: str | None,
    reverse: bool,
    limit: int | None,
    conditions: tuple[str, ...],
    as_json: bool,
) -> None:
    """List the runs in DIR, the newest last.  [default: `runs`, or TITAN_RUNS]

    Columns: run, state, step, loss, tokens/s, age, recipe, note. Loss and speed are the last that were
    logged. A terminal that is too narrow gets shortened names; into a pipe go whole ones, and two blanks or
    more between columns.

    KEY is name, state, step, steps, created, updated, recipe, host, note, or a metric. CONDITION is
    KEY=PATTERN, KEY!=PATTERN, KEY<NUMBER or KEY>NUMBER: state=failed, 'name=llama*', 'loss<2.5'.
    """
    from titancli.observe.selection import matching, ordered
    from titancli.observe.summary import runs_in

    where = runs_root() if folder is None else folder.absolute()
    if RunFolder.is_run(where):
        raise UsageError(f"{folder} is a run, not a folder of runs", hint=f"titan runs show {folder}")
    there, unreadable = runs_in(where) if folder is not None or where.exists() else ([], [])
    for line in unreadable:
        note(line)
    found = matching(there, conditions)
    if sort is not None:
        found = ordered(found, sort, reverse=reverse)[:limit]
    elif limit is not None:
        found = found[-limit:]
    if sort is None and reverse:
        found = found[::-1]
    if not found:
        note(f"there are no {'such ' if there else ''}runs in {short_path(where)}")
    if as_json:
        print_json("runs", {"runs": [_brief(run) for run in found]})
        return
    _list(found)


def _list(runs: list[Summary]) -> None:
    header = ["run", "state", "step", "loss", "tokens/s", "age", "recipe", "note"]
    if sys.stdout.isatty() and not any(run.note for run in runs):
        header.pop()
    if runs:
        rows = [_row(run)[: len(header)] for run in runs]
        table(header, rows, styles=STYLES, names=("run", "recipe", "note"), explained=True)


@command.command("show", short_help="Show one run: its attempts, metrics and environment.")
@click.argument("run", type=RUN)
@JSON
def show(run: Path, as_json: bool) -> None:
    """Show RUN: state, metrics, attempts, checkpoints, versions."""
    from titancli.observe.summary import summarize

    found = summarize(RunFolder.open(run).path, look_back=LOOK_BACK)
    logs = sorted(path.name for path in (found.path / "logs").glob("*.log"))
    if as_json:
        more = {"attempts": [_attempt(attempt) for attempt in found.attempts], "logs": logs}
        print_json("run", {"run": _brief(found) | more | {"environment": _environment(found)}})
        return
    _print_facts(found, logs)
    rows = [_attempt_row(number, attempt) for number, attempt in enumerate(found.attempts, 1)]
    if rows:
        print()
        table(("attempt", "started", "ended", "outcome", "step", "ranks", "from"), rows)


@command.command("compare", short_help="Compare runs: recipes, environments, metrics.")
@click.argument("runs", metavar="RUN RUN...", nargs=-1, required=True, type=RUN)
@click.option(
    "--by",
    type=click.Choice(["step", "tokens", "seconds"]),
    default="step",
    show_default=True,
    help="Where to compare metrics: at equal steps, tokens, or seconds of training.",
)
@click.option(
    "--metric", "names", metavar="NAME", multiple=True, help="Compare this metric; may be repeated."
)
@click.option(
    "-n", "count", type=click.IntRange(1), default=10, show_default=True, help="Places to compare at."
)
@JSON
def compare(runs: tuple[Path, ...], by: str, names: tuple[str, ...], count: int, as_json: bool) -> None:
    """Compare runs: the keys of their recipes that differ, their environments, and their metrics.

    Metrics are those that each run logged last at or before that place.  [default: loss, and that
    of each dataset of [validation]]
    """
    from titancli.cli.comparison import document, print_comparison
    from titancli.observe.summary import summarize

    if len(runs) < 2:
        raise UsageError("compare takes two runs or more", hint="titan runs compare RUN RUN...")
    found = document([summarize(RunFolder.open(run).path) for run in runs], names, count)
    if as_json:
        print_json("comparison", found)
    else:
        print_comparison(found, by)


@command.command("logs", short_help="Print the logs of a run's ranks.")
@click.argument("run", type=RUN)
@click.option("-f", "--follow", is_flag=True, help="Print what is added, until the run ends.")
@click.option(
    "--rank", type=click.IntRange(0), metavar="N", help="The rank whose log is printed.  [default: 0]"
)
@click.option(
    "--all", "every", is_flag=True, help="Print all logs of the run, each line after its log's name."
)
@click.option("--lines", "count", type=click.IntRange(0), metavar="N", help="Only the last N lines of each.")
@JSON
def logs(run: Path, follow: bool, rank: int | None, every: bool, count: int | None, as_json: bool) -> None:
    """Print the log of a rank of RUN: what it printed to stdout and stderr.

    Rank 0's also has the lines of the event log. With -f, an ended run ends the command, and its outcome is
    printed to stderr.
    """
    from titancli.cli.following import follow_logs, print_logs

    if every and rank is not None:
        raise UsageError("--all and --rank exclude each other")
    if follow and as_json:
        raise UsageError("-f and --json exclude each other", hint="events as JSON: titan runs watch --json")
    path, one = RunFolder.open(run).path, None if every else rank or 0
    if follow:
        follow_logs(path, one, count)
    else:
        print_logs(path, one, count, as_json=as_json)


@command.command("watch", short_help="Watch a run: the live panel.")
@click.argument("run", type=RUN)
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON Lines to stdout.")
def watch(run: Path, as_json: bool) -> None:
    """Show RUN as the command that runs it does, from its event log, until it ends; then its outcome.

    RUN may run on another machine that shares the disk. At a terminal this is the panel, else plain lines.
    """
    from titancli.cli import following

    following.watch(RunFolder.open(run).path, as_json=as_json)


@command.command("note", short_help="Write a note about a run.")
@click.argument("run", type=RUN)
@click.argument("text", required=False)
def note_(run: Path, text: str | None) -> None:
    """Write TEXT about RUN, in place of the note that it has; "" removes it. Without TEXT, print the note.

    `runs list`, `show` and `watch` show it. The run may be going on.
    """
    from titancli.observe import notes

    path = RunFolder.open(run).path
    if text is None:
        out(notes.read(path) or "")
    else:
        notes.write(path, text)


@command.command("rm", short_help="Remove runs, after a question.")
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=RUN)
@click.option("--failed", is_flag=True, help="Remove the runs that failed, died, or did nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@JSON
def rm(runs: tuple[Path, ...], failed: bool, yes: bool, as_json: bool) -> None:
    """Remove run folders with everything in them, after a question.

    With --failed, those runs in `runs` (or TITAN_RUNS) that failed, died, or were stopped before their first
    step, and have no checkpoint; one that has checkpoints must be named. A run in use is never removed.
    """
    from titancli.cli import removing
    from titancli.observe.summary import runs_in, summarize

    if bool(runs) == failed:
        raise UsageError("give the runs to remove, or use --failed")
    if failed:
        there, unreadable = runs_in(runs_root()) if runs_root().exists() else ([], [])
        for line in unreadable:
            note(line)
        chosen = [run for run in there if removing.came_to_nothing(run)]
        chosen = [run for run in chosen if not run.path.is_symlink()]
    else:
        chosen = [
            summarize(removing.removable(path)) for path in dict.fromkeys(path.absolute() for path in runs)
        ]
    for run in chosen:
        removing.refuse_in_use(run)
    for run in chosen:
        removing.tell(run)
    if chosen and not yes and not removing.confirmed(chosen):
        chosen = []
    for run in chosen:
        removing.remove(RunFolder(run.path))
        note(f"removed {short_path(run.path)}")
    if not chosen:
        note("nothing was removed")
    if as_json:
        print_json("removed-runs", {"removed": [str(run.path) for run in chosen]})


# ----------------------------------------------------------------------------------------------- words


def _words(state: str) -> str:
    return state.replace("_", " ")


def _when(time: str | None) -> str:
    """Return a timestamp to the second."""
    return f"{time.partition('.')[0].removesuffix('Z')}Z" if time else "-"


def _step(run: Summary) -> str:
    if run.step is None:
        return "-"
    return f"{run.step}/{run.steps}" if run.steps is not None else str(run.step)


def _age(run: Summary) -> str:
    from titancli.observe.console import duration
    from titancli.observe.summary import seconds_since

    seconds = seconds_since(run.created)
    if seconds is None:
        return "-"
    return duration(seconds) if seconds < DAY else f"{seconds // DAY:.0f}d"


def _row(run: Summary) -> tuple[str, ...]:
    from titancli.observe.console import value

    loss, speed = (value(run.metrics, name) for name in ("loss", "tokens_per_second"))
    return (
        *(short_path(run.path.absolute()), _words(run.state), _step(run)),
        *(loss, speed, _age(run), run.recipe or "-", run.note or "-"),
    )


def _print_facts(run: Summary, logs: list[str]) -> None:
    from titancli.observe.console import COUNTS, FIGURES, figure, validation_figures
    from titancli.observe.summary import state_line

    environment = _environment(run)
    git = environment["git"] or {}
    shown = [name for name in FIGURES if run.metrics.get(name) is not None and name != "eta_seconds"]
    shown = [name for name in shown if run.metrics[name] or name not in COUNTS]
    facts = {
        "state": state_line(run),
        "recipe": run.recipe,
        "started": f"{_when(run.created)}, {_age(run)} ago" if run.created else None,
        "latest": ", ".join(figure(run.metrics, name) for name in shown),
        "evaluated": "; ".join(validation_figures(run.metrics)),
        "saved": ", ".join(f"step-{step}" for step in run.checkpoints[-5:]) or "no checkpoint",
        "device": f"{environment['world']} × {environment['device']}" if environment["device"] else None,
        "host": run.host,
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        "git": f"{git['commit']}{', with changes' if git.get('dirty') else ''}" if "commit" in git else None,
        "logs": ", ".join(f"logs/{name}" for name in logs),
        "note": run.note,
        "problem": "; ".join(run.problems),
    }
    out(str(run.path))
    for name, fact in facts.items():
        if fact:
            out(f"  {name:<9} {printable(fact)}")


def _attempt_row(number: int, attempt: dict[str, Any]) -> tuple[str, ...]:
    shown = _attempt(attempt)
    origin = Path(str(shown["checkpoint"])).name if shown["checkpoint"] else "the beginning"
    why = _words(shown["why"]) if shown["why"] else "-"
    step, world = ("-" if shown[name] is None else str(shown[name]) for name in ("step", "world"))
    return (str(number), _when(shown["started"]), _when(shown["ended"]), why, step, world, origin)


# ------------------------------------------------------------------------------------------- documents


def _brief(run: Summary) -> dict[str, Any]:
    from titancli.observe.events import plain

    return {
        "path": str(run.path.absolute()),
        "state": run.state,
        "recipe": run.recipe,
        "step": run.step,
        "steps": run.steps,
        "metrics": plain(run.metrics),
        "created": run.created,
        "updated": run.updated,
        "host": run.host,
        "checkpoints": run.checkpoints,
        "error": run.error,
        "problems": run.problems,
        "note": run.note,
    }


def _attempt(attempt: dict[str, Any]) -> dict[str, Any]:
    outcome = attempt.get("outcome") or {}
    names = ("started", "ended", "host", "world", "device", "mesh", "argv", "recipe", "checkpoint", "drift")
    ends = {name: outcome.get(name) for name in ("why", "signal", "step", "error")}
    return {name: attempt.get(name) for name in names} | ends


def _environment(run: Summary) -> dict[str, Any]:
    """Return the environment of the newest attempt."""
    newest = run.attempts[-1] if run.attempts else {}
    names = ("host", "platform", "device", "world", "mesh", "git", "versions", "plugin_files")
    found = {name: newest.get(name) for name in names}
    return found | {"versions": found["versions"] or {}, "plugin_files": found["plugin_files"] or []}
