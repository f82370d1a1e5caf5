"""The work of `titan runs logs` and `titan runs watch`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from titancli.cli.output import note, out, print_json, short_path
from titancli.errors import EnvironmentProblem
from titancli.observe.console import JsonLines
from titancli.observe.events import EVENTS_FORMAT, Tail, can_be_shown, format_of
from titancli.observe.logs import Lines, log_files
from titancli.observe.panel import Panel, watcher_for
from titancli.observe.summary import Summary, state_line, summarize
from titancli.process import rank_log
from titancli.runs import RunFolder

POLL_SECONDS = 0.5
MAY_GO_ON = ("running", "unknown")


def print_logs(run: Path, rank: int | None, count: int | None, *, as_json: bool) -> None:
    """Print a rank's log, or all logs of the run if there is no `rank`; the last `count` lines, or all.

    Raises:
        EnvironmentProblem: the rank has no log.
    """
    files = _files(run, rank)
    if as_json:
        logs = [
            {"name": name, "path": str(path), "lines": list(_lines(path, count))}
            for name, path in files.items()
        ]
        print_json("logs", {"logs": logs})
        return
    for name, path in files.items():
        for line in _lines(path, count):
            out(f"{name}: {line}" if rank is None else line)


def follow_logs(run: Path, rank: int | None, count: int | None) -> None:
    """Print the logs, then follow them until the run has ended, and print how it ended.

    Raises:
        EnvironmentProblem: the rank of a run that has ended has no log.
    """
    readers: dict[str, Lines] = {}
    for now in _until_ended(run):
        if now.state not in MAY_GO_ON and not readers:
            _files(run, rank)
        for name, path in log_files(RunFolder(run).logs).items():
            if rank is None or path == rank_log(RunFolder(run).logs, rank):
                reader = readers.setdefault(name, Lines(path, count))
                _print(name, reader.poll(), prefix=rank is None)
        sys.stdout.flush()
    for name, reader in readers.items():
        _print(name, reader.rest(), prefix=rank is None)
    note(f"{short_path(run)}: {state_line(now)}")


def watch(run: Path, *, as_json: bool) -> None:
    """Draw a run from its event log until it has ended, as the command that runs it does; then print how it
    ended."""
    tail = Tail(RunFolder(run).events, from_start=True)
    watcher = JsonLines(sys.stdout) if as_json else watcher_for(sys.stdout)
    of_others: set[str] = set()
    replayed = False
    if (about := summarize(RunFolder(run).path).note) and not as_json:
        note(f"{short_path(run)}: {about}")
    try:
        for now in _until_ended(run):
            events = list(tail.poll())
            if not as_json:
                of_others |= {form for event in events if (form := format_of(event)) != str(EVENTS_FORMAT)}
                events = list(filter(can_be_shown, events))
            if isinstance(watcher, Panel) and not replayed:
                watcher.replay(events)
            else:
                for event in events:
                    watcher(event)
            replayed, ended = True, state_line(now)
    finally:
        watcher.close()
    if of_others:
        note(
            f"events of format {', '.join(sorted(of_others))} are not shown: "
            f"this version of titan reads format {EVENTS_FORMAT}"
        )
    if not as_json:
        out(f"{short_path(run)}: {ended}")


def _until_ended(run: Path) -> Iterator[Summary]:
    """Yield the run's summary repeatedly, for the last time once it has ended.

    A caller that reads the run's files after each summary has read them completely.

    Raises:
        EnvironmentProblem: the folder was removed.
    """
    noted = False
    while True:
        now = summarize(RunFolder.open(run).path)
        if now.state == "unknown" and not noted:
            noted = True
            note(f"{short_path(run)}: {'; '.join(now.problems) or 'it is not known whether it still runs'}")
        yield now
        if now.state not in MAY_GO_ON:
            return
        time.sleep(POLL_SECONDS)


def _files(run: Path, rank: int | None) -> dict[str, Path]:
    files = log_files(RunFolder(run).logs)
    if rank is None:
        return files
    name = rank_log(RunFolder(run).logs, rank).stem
    if name not in files:
        there = ", ".join(files)
        raise EnvironmentProblem(
            f"{run} has no log of rank {rank}",
            hint=f"there are: {there}; --all prints them" if there else f"events: titan runs watch {run}",
        )
    return {name: files[name]}


def _lines(path: Path, count: int | None) -> Iterator[str]:
    reader = Lines(path, count)
    yield from reader.poll()
    yield from reader.rest()


def _print(name: str, lines: Iterator[str], *, prefix: bool) -> None:
    for line in lines:
        out(f"{name}: {line}" if prefix else line)
