"""The local launcher: one process runs in place, more run under torchrun. Torch-free.

What people see comes from the event log: in place the worker hands the events over, otherwise this process
reads them as rank 0 writes them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from titancli.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STOPPED,
    TitanError,
)
from titancli.files import read_json, regular
from titancli.launch import LaunchRequest
from titancli.launchers import Local
from titancli.launchers.agent import EXIT_LOST
from titancli.launchers.devices import allocator_settings
from titancli.launchers.torchrun import (
    Drawing,
    Signals,
    ends_file,
    launcher_log,
    run_agent,
    take_part,
    torchrun_command,
)
from titancli.observe import failures
from titancli.observe.console import Console, JsonLines
from titancli.observe.events import EventLog, Listener, Tail
from titancli.observe.panel import Panel, watcher_for
from titancli.process import copy_into, own_folder, rank_log, require_locks
from titancli.runs import ChangedMeanwhile, Claim, RunFolder, TakenOver, timestamp
from titancli.signals import say
from titancli.terminal import printable

PATIENCE = 60.0
"""Seconds for which a node waits for what another one writes of the end: a network disk may show it late."""
LAST_LINES = 15
"""Number of lines of torchrun's log to show if no rank could be started."""


def launch(config: Local, *, request: LaunchRequest) -> int:
    """Run the workers to their end and return the command's exit code.

    Raises:
        TitanError: what a user can put right, whichever rank it came from.
    """
    return _in_place(request) if in_place(config, request) else _under_torchrun(config, request)


def in_place(config: Local, request: LaunchRequest) -> bool:
    """Return whether the only rank runs in this process."""
    return request.world == 1 and config.max_restarts == 0


def exit_code(outcome: dict[str, Any]) -> int:
    """Return the command's exit code for an outcome that a worker, or the command of another node, wrote."""
    codes = {"stopped": EXIT_STOPPED, "interrupted": EXIT_INTERRUPTED, "failed": EXIT_FAILED}
    return codes.get(outcome["why"], EXIT_OK)


# --------------------------------------------------------------------------------------------- in place


def _in_place(request: LaunchRequest) -> int:
    before = failures.there(request.folder.logs)
    with _watcher(request) as watcher:
        try:
            outcome = _only_rank(request, watcher)
        except BaseException as error:
            if isinstance(error, TakenOver):
                raise  # the record, and the events, are another attempt's by now
            failure = failures.cause(failures.read(request.folder.logs, before=before), [], [])
            done = failure.step - 1 if failure and failure.step else None
            if isinstance(error, KeyboardInterrupt):
                _record_outcome(request, watcher, "interrupted", signal.SIGINT, done)
                return EXIT_INTERRUPTED
            _record_outcome(request, watcher, "failed", None, done, failures.words(error))
            if isinstance(error, TitanError) or request.traceback:
                raise
            return _say_failure(failure, request, [])
    return exit_code(outcome)


def _only_rank(request: LaunchRequest, watcher: Panel | Console | JsonLines) -> dict[str, Any]:
    """Run the only rank and return its outcome; its output is also in the log that it would have as one of
    several."""

    from titancli.worker import rank

    os.environ.update(allocator_settings())
    with copy_into(rank_log(request.folder.logs, 0), "rank 0 of 1") as log:
        try:
            return rank.main(
                request.run_folder,
                checkpoint=request.checkpoint,
                plugin_files=request.plugin_files,
                listeners=(watcher, Console(log)),
            )
        except BaseException:
            log.write(traceback.format_exc())
            with suppress(OSError):  # whoever read what is printed may be gone
                watcher.close()  # the panel may stand in front of the streams
            raise


@contextmanager
def _watcher(request: LaunchRequest) -> Iterator[Panel | Console | JsonLines]:
    """Yield the drawer of events. With `--json` only events go to stdout, and all other output to stderr."""
    if not request.json_events:
        yield watcher_for(sys.stderr)
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)
        try:
            yield JsonLines(stream)
        finally:
            sys.stdout.flush()
            os.dup2(stream.fileno(), 1)


# ----------------------------------------------------------------------------------------- under torchrun


def _under_torchrun(config: Local, request: LaunchRequest) -> int:
    folder = request.folder
    folder.logs.mkdir(parents=True, exist_ok=True)
    before, tail = failures.there(folder.logs), Tail(folder.events)
    with (
        _watcher(request) as watcher,
        open(launcher_log(request), "a", encoding="utf-8", opener=regular) as log,
        Signals() as signals,
    ):
        drawing = Drawing(tail, watcher)
        if request.nnodes == 1:
            with own_folder() as store:
                require_locks(store)
                command = torchrun_command(config, request, store=store)
                code = run_agent(command, request, log, drawing, signals)
        else:
            code = take_part(config, request, log, drawing, signals)
        drawing.close()
        if (
            code == EXIT_LOST and drawing.ended
        ):  # the others were done, and their store gone, before this node
            code = EXIT_OK
        return _result(request, watcher, code, before, drawing.step, signals)


def _result(
    request: LaunchRequest,
    watcher: Listener,
    agent_code: int,
    before: failures.Reports,
    step: int | None,
    signals: Signals,
) -> int:
    """Return the exit code, from what the ranks left behind."""
    outcome = _outcome(request, PATIENCE if agent_code == EXIT_OK and request.nnodes > 1 else 0.0)
    lost = agent_code < 0 and not signals.received  # somebody killed torchrun
    if outcome is None and agent_code == EXIT_OK:  # so ends torchrun too where another node's has given up
        say(f"error: the run has ended on another machine, and {request.folder.record_file} does not say how"
            f"\nsee what was printed there; log: {launcher_log(request)}")  # fmt: skip
        return EXIT_FAILED
    # Where the ranks of other nodes have failed, the agent of a spare ends well.
    well = agent_code == EXIT_OK or (agent_code == -signal.SIGKILL and not lost)
    if outcome is not None and outcome["why"] != "failed" and well:
        return exit_code(outcome)
    kills, late_kills = _killed_ranks(request, None if step is None else step + 1)
    reports = failures.read(request.folder.logs, before=before)
    waited = agent_code == EXIT_STOPPED  # for other nodes, when the signal came; its ranks had failed before
    if signals.received and (waited or signals.ended(reports, kills + late_kills)):
        interrupted = signals.received[0] == signal.SIGINT
        why = "interrupted" if interrupted else "stopped"
        _record_outcome(request, watcher, why, signals.received[0], step)
        return EXIT_INTERRUPTED if interrupted else EXIT_STOPPED
    failure = failures.cause(reports, kills, late_kills)
    if failure and failure.type == TakenOver.__name__:
        return _say_failure(failure, request, [])  # the record, and the events, are another attempt's by now
    unmet = _unmet(request) if agent_code == EXIT_LOST else None
    if failure and failure.type == ChangedMeanwhile.__name__:
        raise ChangedMeanwhile(request.folder)
    error = f"rank {failure.rank}: {failure.words}" if failure else unmet or "the ranks could not be started"
    _record_outcome(request, watcher, "failed", None, step, error)
    if lost and (outcome is not None or not reports):  # what fails after the outcome is an echo
        name, saved = signal.Signals(-agent_code).name, outcome["checkpoint"] if outcome else None
        done = f"its ranks saved {saved}" if saved else "its ranks saved nothing"
        say(f"error: torchrun was killed by {name}; {done}")
        return EXIT_FAILED
    if failure is None and (reason := unmet or (outcome or {}).get("error")):
        say(f"error: {reason}\nlog: {launcher_log(request)}")
        return EXIT_FAILED
    return _say_failure(failure, request, failures.silent(reports, request.world))


def _outcome(request: LaunchRequest, patience: float) -> dict[str, Any] | None:
    """Return how the run ended. Another node's command may be about to write that it has failed."""
    deadline = time.monotonic() + patience
    while True:
        outcome = request.folder.outcome() if request.folder.record_file.exists() else None
        if outcome is not None or time.monotonic() > deadline:
            return outcome
        time.sleep(0.1)


def _unmet(request: LaunchRequest) -> str:
    if request.nnodes == 1:
        return "torchrun has lost the rendezvous that it serves itself"
    where = request.rdzv or f"{request.folder.rendezvous}, which all of them must share"
    return (
        f"the nodes did not meet at {where}, or lost each other\n start the same command on {request.nodes} "
        "machines; launcher.join_timeout_seconds is how long they wait for each other"
    )


# ----------------------------------------------------------------------------------------------- failures


def _killed_ranks(
    request: LaunchRequest, step: int | None
) -> tuple[list[failures.Failure], list[failures.Failure]]:
    """Ranks of this node that a signal ended: by themselves, and after others had failed."""
    try:
        ends = sorted(read_json(ends_file(request)), key=lambda end: end["time"])
    except (OSError, ValueError, TypeError, KeyError):
        return [], []
    early: list[failures.Failure] = []
    late: list[failures.Failure] = []
    for end in ends:
        if end["exit_code"] < 0:
            # When one rank fails torchrun sends the others SIGTERM, and SIGKILL after 30 seconds.
            own = end["time"] - ends[0]["time"] <= 2 and end["exit_code"] != -signal.SIGTERM
            (early if own else late).append(
                failures.killed(end["rank"], request.world, -end["exit_code"], step)
            )
    return early, late


def _say_failure(failure: failures.Failure | None, request: LaunchRequest, silent: list[int]) -> int:
    """Print one block: who failed first, when, why, and where the log is."""
    logs = request.folder.logs
    if failure is None:
        log = launcher_log(request)
        last = printable("".join(f"  {line}\n" for line in _last_lines(log)), "\n\t")
        say(f"error: the ranks could not be started\n{last}log: {log}")
        return EXIT_FAILED
    say(f"error: {failures.block(failure, rank_log(logs, failure.rank), silent)}")
    return failure.exit_code


def _last_lines(log: Path) -> list[str]:
    """Return what torchrun had to say in this start, at most its last lines."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # the log is named all the same
        return []
    begins = max((n for n, line in enumerate(lines) if line.startswith("--- ")), default=-1)
    return lines[begins + 1 :][-LAST_LINES:]


def _record_outcome(
    request: LaunchRequest,
    watcher: Listener,
    why: str,
    number: int | None,
    step: int | None,
    error: str | None = None,
) -> None:
    """Write the outcome that no worker could write, and tell it as the run's last event."""
    folder = request.folder
    if not folder.record_file.exists() or folder.outcome() is not None:
        return
    try:
        Claim.of(folder, RunFolder(request.lock_file.parent).record()).check()
    except TakenOver:  # the newest attempt is another one, or another node's to record
        return
    name = signal.Signals(number).name if number is not None else None
    outcome: dict[str, Any] = {"why": why, "signal": name, "step": step, "checkpoint": None, "metrics": {}}
    if error is not None:
        outcome["error"] = error
    try:
        folder.update_attempt(outcome=outcome, ended=timestamp())
        EventLog(folder.events, (watcher,)).write("run_end", **outcome)
    except (OSError, TitanError) as second:  # a full disk must not hide why the run failed
        say(f"error: {second}")
