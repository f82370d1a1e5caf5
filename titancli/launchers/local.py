"""The local launcher: one process runs in place, more run under torchrun. Torch-free.

What people see comes from the event log: in place the worker hands the events over, otherwise this process
reads them as rank 0 writes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
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
    EnvironmentProblem,
    TitanError,
)
from titancli.launch import LaunchRequest
from titancli.launchers import Local
from titancli.observe import failures
from titancli.observe.console import Console, JsonLines
from titancli.observe.events import EventLog, Listener, Tail
from titancli.observe.panel import Panel, watcher_for
from titancli.process import copy_into, rank_log
from titancli.runs import Claim, RunFolder, TakenOver, timestamp
from titancli.signals import STOPPING, heeded, say

POLL_SECONDS = 0.1
LAST_LINES = 15
"""Of torchrun's log, shown where no rank could be started."""
KILL_SECONDS = 10.0
"""How long ranks that were killed may take to go."""


def launch(config: Local, **given: Any) -> int:
    """Run the workers to their end and return the command's exit code.

    Raises:
        TitanError: what a user can put right, whichever rank it came from.
    """
    request = LaunchRequest(**given)
    return _in_place(request) if in_place(config, request) else _under_torchrun(config, request)


def in_place(config: Local, request: LaunchRequest) -> bool:
    """Return whether the only rank runs in this process."""
    return request.world == 1 and config.max_restarts == 0


def exit_code(outcome: dict[str, Any]) -> int:
    """The command's exit code for an outcome that a worker wrote."""
    return {"stopped": EXIT_STOPPED, "interrupted": EXIT_INTERRUPTED}.get(outcome["why"], EXIT_OK)


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
    from titancli.run import worker

    with copy_into(rank_log(request.folder.logs, 0), "rank 0 of 1") as log:
        try:
            return worker.main(
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
    """What draws the events. Under `--json` they alone go to stdout; all else that is printed, to stderr."""
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


def torchrun_command(config: Local, request: LaunchRequest) -> list[str]:
    """The command that starts this node's ranks."""
    if request.nnodes == 1:
        rendezvous = ["--standalone"]
    else:
        if request.rdzv is None:
            raise EnvironmentProblem(
                f"{request.nnodes} nodes need a rendezvous address",
                hint="add --rdzv HOST:PORT, the same on every node",
            )
        meeting = hashlib.sha256(str(request.run_folder).encode()).hexdigest()[:12]
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={request.rdzv}", f"--rdzv-id=titan-{meeting}"]
    return [
        *(sys.executable, "-m", "titancli.launchers.agent", str(_ends_file(request))),
        *(f"--nnodes={request.nnodes}", f"--nproc-per-node={request.nproc}", *rendezvous),
        *(f"--max-restarts={config.max_restarts}", "-m", "titancli.run.worker", *request.rank_arguments()),
    ]


def _ends_file(request: LaunchRequest) -> Path:
    return request.folder.logs / f"agent-{socket.gethostname()}.json"


def _under_torchrun(config: Local, request: LaunchRequest) -> int:
    folder = request.folder
    command = torchrun_command(config, request)
    folder.logs.mkdir(parents=True, exist_ok=True)
    _ends_file(request).unlink(missing_ok=True)
    before, tail = failures.there(folder.logs), Tail(folder.events)
    with (
        _watcher(request) as watcher,
        open(_launcher_log(request), "a", encoding="utf-8") as log,
        _Signals() as signals,
    ):
        log.write(f"--- {timestamp()} {' '.join(command)}\n")
        log.flush()
        agent = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(request.nproc),
            start_new_session=True,  # Ctrl-C at the terminal reaches the ranks through us, once
        )
        try:
            step = _follow(agent, tail, watcher, signals)
        finally:
            _end(agent)
        if agent.returncode < 0:
            _outlast(folder, signals)
        return _result(request, watcher, agent.returncode, before, step, signals)


def _follow(
    agent: subprocess.Popen[bytes], tail: Tail, watcher: Panel | Console | JsonLines, signals: _Signals
) -> int | None:
    """Draw events and hand signals on until the agent has ended; the last step that was told."""
    step, watched = None, True
    while True:
        ended = agent.poll() is not None
        for event in tail.poll():
            step = event.get("step", step)
            try:
                if watched:
                    watcher(event)
            except OSError:  # the terminal or the reader has gone away: no reason to end the run
                watched = False
        if ended:
            break
        signals.hand_on(agent)
        time.sleep(POLL_SECONDS)
    if watched:
        with suppress(OSError):
            watcher.close()
    return step


def _result(
    request: LaunchRequest,
    watcher: Listener,
    agent_code: int,
    before: failures.Reports,
    step: int | None,
    signals: _Signals,
) -> int:
    """The exit code, from what the ranks left behind."""
    outcome = request.folder.outcome() if request.folder.record_file.exists() else None
    lost = agent_code < 0 and not signals.received  # somebody killed torchrun
    if outcome is not None and (agent_code == EXIT_OK or (agent_code == -signal.SIGKILL and not lost)):
        return exit_code(outcome)
    if agent_code == EXIT_OK:  # rank 0 of another node wrote the outcome, and this node does not see it yet
        return EXIT_OK
    kills, late_kills = _killed_ranks(request, None if step is None else step + 1)
    reports = failures.read(request.folder.logs, before=before)
    if signals.ended(reports, kills + late_kills):
        interrupted = signals.received[0] == signal.SIGINT
        why = "interrupted" if interrupted else "stopped"
        _record_outcome(request, watcher, why, signals.received[0], step)
        return EXIT_INTERRUPTED if interrupted else EXIT_STOPPED
    failure = failures.cause(reports, kills, late_kills)
    if failure and failure.type == TakenOver.__name__:
        return _say_failure(failure, request, [])  # the record, and the events, are another attempt's by now
    error = f"rank {failure.rank}: {failure.words}" if failure else "the ranks could not be started"
    _record_outcome(request, watcher, "failed", None, step, error)
    if lost and (outcome is not None or not reports):  # what fails after the outcome is an echo
        name, saved = signal.Signals(-agent_code).name, outcome["checkpoint"] if outcome else None
        done = f"its ranks saved {saved}" if saved else "its ranks saved nothing"
        say(f"error: torchrun was killed by {name}; {done}")
        return EXIT_FAILED
    return _say_failure(failure, request, failures.silent(reports, request.world))


class _Signals:
    """Signals of this process while ranks run: remembered, and handed on to the agent."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.waiting: list[int] = []
        """Those that were not handed on yet."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in heeded():
            self._before[number] = signal.signal(number, lambda n, frame: self.waiting.append(n))
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hand_on(self, agent: subprocess.Popen[bytes]) -> None:
        """Tell the agent, and the user, of what came since the last call."""
        while self.waiting:
            number = self.waiting.pop(0)
            again = number == signal.SIGINT and signal.SIGINT in self.received
            self.received.append(number)
            name = signal.Signals(number).name
            if again:
                say("\ninterrupted again: exiting now")
            else:
                more = "; press Ctrl-C again to exit now" if number == signal.SIGINT else ""
                say(f"\n{name}: {STOPPING.get()}{more}")
            agent.send_signal(number)
            if again:
                _end(agent, KILL_SECONDS)

    def ended(self, reports: list[failures.Failure], kills: list[failures.Failure]) -> bool:
        """Whether the signals ended ranks that were only starting, or that the user would not wait for."""
        if not self.received:
            return False
        by_hand = self.received.count(signal.SIGINT) > 1
        return by_hand or (
            not reports and {kill.type for kill in kills} <= {signal.Signals(n).name for n in self.received}
        )


def _end(agent: subprocess.Popen[bytes], patience: float = 0.0) -> None:
    """Leave no process behind, whatever brought us here."""
    from titancli.launchers.agent import children, signal_group

    try:
        agent.wait(patience)
    except subprocess.TimeoutExpired:
        for process in children(agent.pid):
            signal_group(process, signal.SIGKILL)
        agent.kill()
        agent.wait()


def _outlast(folder: RunFolder, signals: _Signals) -> None:
    """Ranks that have lost torchrun save and leave by themselves, and until then the folder is theirs."""
    while folder.ranks_at_work() and not signals.waiting:
        time.sleep(POLL_SECONDS)


def _environment(nproc: int) -> dict[str, str]:
    environment = dict(os.environ)
    if nproc > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # `python -m` would look for modules in the working directory first: a random.py there would be run.
    environment["PYTHONSAFEPATH"] = "1"
    # Where torchrun itself is signalled (it is not by us), ranks get time to save.
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    return environment


# ----------------------------------------------------------------------------------------------- failures


def _killed_ranks(
    request: LaunchRequest, step: int | None
) -> tuple[list[failures.Failure], list[failures.Failure]]:
    """Ranks of this node that a signal ended: by themselves, and after others had failed."""
    try:
        ends = sorted(json.loads(_ends_file(request).read_text()), key=lambda end: end["time"])
    except (OSError, ValueError):
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
        log = _launcher_log(request)
        last = "".join(f"  {line}\n" for line in _last_lines(log))
        say(f"error: the ranks could not be started\n{last}log: {log}")
        return EXIT_FAILED
    say(f"error: {failures.block(failure, rank_log(logs, failure.rank), silent)}")
    return failure.exit_code


def _launcher_log(request: LaunchRequest) -> Path:
    name = "launcher.log" if request.nnodes == 1 else f"launcher-{socket.gethostname()}.log"
    return request.folder.logs / name


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
