"""torchrun on this node: started, watched and handed signals, once or as often as nodes meet. Torch-free."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from titancli.errors import EXIT_STOPPED
from titancli.launch import LaunchRequest
from titancli.launchers import Local
from titancli.launchers.address import reachable, variables
from titancli.launchers.agent import EXIT_LOST, ONE_NODE, children, signal_group
from titancli.launchers.devices import allocator_settings
from titancli.launchers.rendezvous import Meeting
from titancli.observe import failures
from titancli.observe.console import Console, JsonLines
from titancli.observe.events import Tail
from titancli.observe.panel import Panel
from titancli.process import as_child
from titancli.provenance import code_hashes, file_hash, package_versions
from titancli.runs import RunFolder, timestamp
from titancli.signals import STOPPING, heeded, say
from titancli.terminal import printable

POLL_SECONDS = 0.1
KILL_SECONDS = 10.0
"""Seconds that killed ranks may take to exit."""
LOOK_SECONDS = 10.0
"""Seconds between two checks of a node for running ranks. torchrun itself takes seconds to start."""


def torchrun_command(
    config: Local, request: LaunchRequest, meeting: Meeting | None = None, store: Path | None = None
) -> list[str]:
    """Return the command that starts this node's ranks. They meet in a folder, `store`, that this user alone
    can read; on several nodes at the place of `meeting`, or at `--rdzv`."""
    if request.nnodes == 1:
        rendezvous = [f"--rdzv-backend={ONE_NODE}", "--rdzv-id=titan"]
    else:
        name = hashlib.sha256(str(request.run_folder).encode()).hexdigest()[:12]
        beat = max(1, config.node_timeout_seconds // 6)
        settings = {
            "join_timeout": config.join_timeout_seconds,
            "last_call_timeout": config.node_timeout_seconds,
            "read_timeout": config.node_timeout_seconds,
            "keep_alive_interval": beat,
            "keep_alive_max_attempt": -(-config.node_timeout_seconds // beat),
        }
        if meeting is not None:
            settings["is_host"] = int(meeting.serves)
        endpoint = request.rdzv if meeting is None else meeting.endpoint
        rendezvous = [
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id=titan-{name}"),
            f"--local-addr={reachable()}",
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in settings.items()),
        ]
    return [
        *(sys.executable, "-m", "titancli.launchers.agent", str(ends_file(request))),
        *(f"--nnodes={request.nodes}", f"--nproc-per-node={request.nproc}", *rendezvous),
        *(f"--max-restarts={config.max_restarts}", "-m", "titancli.worker.rank", *request.rank_arguments()),
        *(() if store is None else ("--store", str(store))),
    ]


def ends_file(request: LaunchRequest) -> Path:
    return request.folder.logs / f"agent-{socket.gethostname()}.json"


def take_part(config: Local, request: LaunchRequest, log: TextIO, drawing: Drawing, signals: Signals) -> int:
    """Have this node take part until the run has ended; the exit code of the last agent.

    Where the rendezvous is lost, and it is with the node that serves it, the node joins the next one: as
    often as ranks may be restarted, and, as long as no step is done, for as long as others are waited for.
    """
    meeting = None
    if request.rdzv is None:
        meeting = Meeting(
            request.folder.rendezvous,
            config.node_timeout_seconds,
            same=_same_on_all_nodes(request),
            reach=config.join_timeout_seconds / 4,
            say=say,
        )
    restarts, step, since = config.max_restarts, None, time.monotonic()
    waiting = Waiting(config, request, drawing)

    def given_up() -> bool:
        waited = time.monotonic() - since
        return bool(signals.waiting) or waited > config.join_timeout_seconds

    def ends(agent: int) -> int | None:
        waiting.look(agent)
        lost = meeting is not None and not meeting.beat(lambda: not children(agent))
        if signals.received and (lost or waiting.idle):  # the ranks that heard the signal are gone
            return EXIT_STOPPED
        return EXIT_LOST if lost else None

    try:
        while True:
            if meeting is not None and not meeting.find(given_up):
                signals.hand_on(None)
                return EXIT_STOPPED if signals.received else EXIT_LOST
            command = torchrun_command(config, request, meeting)
            code = run_agent(command, request, log, drawing, signals, ends)
            if code != EXIT_LOST or signals.received or drawing.ended:
                return code
            if drawing.step != step:
                restarts, step, since = restarts - 1, drawing.step, time.monotonic()
            if restarts < 0 or given_up():
                return code
            say("the nodes have lost each other: meeting again")
    finally:
        if meeting is not None:
            meeting.leave()


def _same_on_all_nodes(request: LaunchRequest) -> dict[str, str]:
    """Return the values that ranks compare too, but only after they have met."""
    files = ", ".join(f"{path.name} (SHA-256 {file_hash(path)[:12]})" for path in request.plugin_files)
    code = ", ".join(f"{name} {digest[:12]}" for name, digest in code_hashes().items())
    return {
        "resolved recipes": request.lock_file.read_text(encoding="utf-8"),
        "numbers of machines or processes": f"--nnodes {request.nodes} --nproc {request.nproc}",
        "versions": ", ".join(f"{name} {version}" for name, version in package_versions().items()),
        "code of titan or its plugins": code,
        "plugin files": files or "none",
    }


def run_agent(
    command: list[str],
    request: LaunchRequest,
    log: TextIO,
    drawing: Drawing,
    signals: Signals,
    ends: Callable[[int], int | None] = lambda agent: None,
) -> int:
    """Run torchrun to its end and return its exit code, or the one from `ends`: it is called regularly with
    torchrun's process id, and ends torchrun if it returns an exit code."""
    ends_file(request).unlink(missing_ok=True)
    log.write(f"--- {timestamp()} {printable(shlex.join(command))}\n")
    log.flush()
    agent = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=_environment(request.nproc, request.nnodes) | as_child(),
        start_new_session=True,  # Ctrl-C at the terminal reaches the ranks through us, once
    )
    try:
        while agent.poll() is None:
            drawing.draw()
            signals.hand_on(agent)
            if (code := ends(agent.pid)) is not None:
                return code
            time.sleep(POLL_SECONDS)
        drawing.draw()
    finally:
        _end(agent)
    if agent.returncode < 0:
        _outlast(request.folder, signals)
    return agent.returncode


class Waiting:
    """Says that no ranks run on this node, once each time: others are waited for, or it is a spare."""

    def __init__(self, config: Local, request: LaunchRequest, drawing: Drawing) -> None:
        self._others = (
            f"waiting for other machines (--nnodes {request.nodes}), at most {config.join_timeout_seconds} "
            "seconds (launcher.join_timeout_seconds)"
        )
        self._drawing, self._looked = drawing, time.monotonic()
        self._none = self._said = self._spare = False
        self.idle = False
        """True if there have been no ranks for a while."""
        self._step: int | None = None
        """The run's step when this node was first found without ranks."""

    def look(self, agent: int) -> None:
        """Look whether the agent has ranks, now and then."""
        if time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked, before = time.monotonic(), self._none
        self._none = not children(agent)
        self.idle = self._none and before
        if not self.idle:
            self._said, self._spare, self._step = False, False, self._drawing.step
        elif self._drawing.step != self._step and not self._spare:
            say("the run has enough machines: this one waits as a spare")
            self._said = self._spare = True
        elif not self._said:
            say(self._others)
            self._said = True


class Drawing:
    """The view of the event log for the user."""

    def __init__(self, tail: Tail, watcher: Panel | Console | JsonLines) -> None:
        self._tail, self._watcher, self._watched = tail, watcher, True
        self.step: int | None = None
        """The last step shown."""
        self.ended = False
        """True if the run's end was the last event shown."""

    def draw(self) -> None:
        """Draw what was written since the last call."""
        for event in self._tail.poll():
            self.step = event.get("step", self.step)
            self.ended = event["event"] == "run_end"
            try:
                if self._watched:
                    self._watcher(event)
            except OSError:  # the terminal or the reader has gone away: no reason to end the run
                self._watched = False

    def close(self) -> None:
        if self._watched:
            with suppress(OSError):
                self._watcher.close()


class Signals:
    """Signals of this process while ranks run: remembered, and handed on to the agent."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.waiting: list[int] = []
        """Signals that have not been passed on yet."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in heeded():
            self._before[number] = signal.signal(number, lambda n, frame: self.waiting.append(n))
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hand_on(self, agent: subprocess.Popen[bytes] | None) -> None:
        """Tell the agent, if there is one, and the user, of what came since the last call."""
        while self.waiting:
            number = self.waiting.pop(0)
            again = number == signal.SIGINT and signal.SIGINT in self.received
            self.received.append(number)
            name = signal.Signals(number).name
            if again:
                say("\ninterrupted again: exiting now")
            elif agent is None or not children(agent.pid):
                say(f"\n{name}: stopping")
            else:
                more = "; press Ctrl-C again to exit now" if number == signal.SIGINT else ""
                say(f"\n{name}: {STOPPING.get()}{more}")
            if agent is None:
                continue
            agent.send_signal(number)
            if again:
                _end(agent, KILL_SECONDS)

    def ended(self, reports: list[failures.Failure], kills: list[failures.Failure]) -> bool:
        """Return whether the signals ended ranks that were still starting, or that the user did not wait
        for."""
        if not self.received:
            return False
        by_hand = self.received.count(signal.SIGINT) > 1
        return by_hand or (
            not reports and {kill.type for kill in kills} <= {signal.Signals(n).name for n in self.received}
        )


def _end(agent: subprocess.Popen[bytes], patience: float = 0.0) -> None:
    """Leave no process behind, whatever brought us here."""
    try:
        agent.wait(patience)
    except subprocess.TimeoutExpired:
        for process in children(agent.pid):
            signal_group(process, signal.SIGKILL)
        agent.kill()
        agent.wait()


def _outlast(folder: RunFolder, signals: Signals) -> None:
    """Ranks that have lost torchrun save and leave by themselves, and until then the folder is theirs."""
    while folder.ranks_at_work() and not signals.waiting:
        time.sleep(POLL_SECONDS)


def _environment(nproc: int, nnodes: int = 1) -> dict[str, str]:
    environment = {**os.environ, **allocator_settings()}
    if nproc > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    if nnodes > 1:
        # Ranks meet at a store of rank 0: torchrun's own stays on the node that had rank 0 first, and a node
        # that takes the place of another never hears of it.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        environment |= variables()
    # `python -m` would look for modules in the working directory first: a random.py there would be run.
    environment["PYTHONSAFEPATH"] = "1"
    # Where torchrun itself is signalled (it is not by us), ranks get time to save.
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    return environment


def launcher_log(request: LaunchRequest) -> Path:
    name = "launcher.log" if request.nnodes == 1 else f"launcher-{socket.gethostname()}.log"
    return request.folder.logs / name
