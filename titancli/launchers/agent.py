"""A torchrun agent for titan: `python -m titancli.launchers.agent REPORT TORCHRUN-ARGUMENTS…`.

It differs from `python -m torch.distributed.run` in seven ways:

- It passes a signal on to the ranks and waits for them without a time limit, since they are saving; torchrun
  would kill them. (Ranks that are too young to heed the signal die. Those started in their place find it in
  their environment.)
- A second SIGINT kills the ranks.
- It writes how the ranks ended to REPORT as JSON, not to the terminal.
- The end of the rendezvous, which is not a failure of a rank, has an exit code of its own.
- It does not compare the clocks of nodes.
- It does not wait for a program at the endpoint that is not a rendezvous.
- A single node opens no port: torch's `--standalone` serves two stores to whoever reaches the machine, and
  unpickles what lies in them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from titancli.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from titancli.files import regular
from titancli.process import as_child, die_with_parent, parent_of
from titancli.signals import ASKED_TO_STOP, EXIT_NODES_JOIN, NODES_JOIN, heeded

ONE_NODE = "titan_one_node"
"""The rendezvous, among those that torchrun knows, of a node that waits for no others."""
EXIT_LOST = 6
"""The rendezvous is gone: the node that served it, or the way there; or no others came."""


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait; 0 when all of them ended in good order."""
    report, rest = Path(arguments[0]), list(arguments[1:])
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        again = number == signal.SIGINT and signal.SIGINT in received
        received.append(number)
        os.environ.setdefault(ASKED_TO_STOP, signal.Signals(number).name)
        ranks = children(os.getpid())
        if not ranks:  # none has been started, so there is nothing to wait for
            os._exit(EXIT_STOPPED)
        for process in ranks:
            signal_group(process, signal.SIGKILL if again else number)
        if again:  # torchrun might start them anew
            os._exit(EXIT_FAILED)

    for number in heeded():
        signal.signal(number, handle)
    die_with_parent()
    os.environ |= as_child()  # of the ranks

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher import api
    from torch.distributed.run import parse_args, run

    vars(api)["LocalElasticAgent"] = _agent_class()
    _count_only_nodes_that_fit()
    _ask_no_other_clock()
    _record_no_steps()
    _wait_for_no_other_program()
    _rendezvous_of_one()
    # torchrun's own handlers are kept for the one signal that means: kill them all.
    options = parse_args(["--signals-to-handle", "SIGQUIT", *rest])
    try:
        run(options)
    except ChildFailedError as error:
        ends = [
            {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        try:
            with open(report, "w", encoding="utf-8", opener=regular) as file:
                file.write(json.dumps(ends))
        except OSError as failure:
            print(f"cannot write {report}: {failure.strerror}; ranks that failed: {ends}", file=sys.stderr)
        return EXIT_FAILED
    except (RendezvousError, DistError) as error:
        print(f"the rendezvous is lost: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_LOST
    return EXIT_OK


def _agent_class() -> Any:
    from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        def run(self, role: str = DEFAULT_ROLE) -> RunResult:
            """Succeed on a spare node that was not needed: torch has no result for it, and would fail."""
            return super().run(role) or RunResult(state=WorkerState.SUCCEEDED)

        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            """Let the ranks save first if more nodes join; torch would give them 30 seconds in all."""
            if _node_is_lost(worker_group):  # they wait for it, some of them for hours, and cannot save
                for process in children(os.getpid()):
                    signal_group(process, signal.SIGKILL)
            elif worker_group.state == WorkerState.HEALTHY:
                for process in children(os.getpid()):
                    signal_group(process, NODES_JOIN)
                deadline = time.monotonic() + self._shutdown_timeout
                while children(os.getpid()) and time.monotonic() < deadline:
                    time.sleep(0.1)
            super()._restart_workers(worker_group)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            """Ranks notified by another node's agent end before this one notices; that is not a failure."""
            result = super()._monitor_workers(worker_group)
            ends = [failure.exitcode for failure in result.failures.values()]
            if ends and all(end in (EXIT_NODES_JOIN, -NODES_JOIN) for end in ends):
                self._remaining_restarts += 1  # torch takes one for it
            if result.state == WorkerState.HEALTHY and _node_is_lost(worker_group):
                return RunResult(state=WorkerState.UNHEALTHY)
            return result

    return Agent


def _node_is_lost(worker_group: Any) -> bool:
    """Return whether a node of the running ranks' group has left the rendezvous, or is silent."""
    if worker_group.spec.rdzv_handler.get_backend() == ONE_NODE:
        return False
    state = worker_group.spec.rdzv_handler._state_holder.state
    return bool(state.complete and len(state.participants) < worker_group.group_world_size)


def _count_only_nodes_that_fit() -> None:
    """Count only waiting nodes that fit: a spare node that lost the race for the last place waits for the
    next round, and torch would restart all ranks for it, again and again."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler as Handler

    counted = Handler.num_nodes_waiting

    def num_nodes_waiting(handler: Handler) -> int:
        waiting = counted(handler)
        full = len(handler._state_holder.state.participants) >= handler.settings.max_nodes
        return 0 if full else waiting

    Handler.num_nodes_waiting = num_nodes_waiting  # type: ignore[assignment, method-assign]


def _ask_no_other_clock() -> None:
    """torch takes a node for lost whose last sign of life is old by the clock of whoever looks: where clocks
    differ by more than `node_timeout_seconds`, all would lose each other. What counts is how long a sign has
    been the last one here."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    Holder = dynamic_rendezvous._BackendRendezvousStateHolder
    sanitize = Holder._sanitize
    seen: dict[Any, tuple[datetime, float]] = {}

    def aged(holder: Any) -> None:
        state, now = holder._state, time.monotonic()
        signs = dict(state.last_heartbeats)
        for node in set(seen) - set(signs):
            del seen[node]
        for node, sign in signs.items():
            if node not in seen or seen[node][0] != sign:
                seen[node] = (sign, now)
            state.last_heartbeats[node] = datetime.now(UTC) - timedelta(seconds=now - seen[node][1])
        sanitize(holder)
        state.last_heartbeats = {node: signs[node] for node in state.last_heartbeats}

    Holder._sanitize = aged  # type: ignore[assignment, method-assign]


def _record_no_steps() -> None:
    """torch has a record of each step of a rendezvous, which nobody reads here. It looks through all modules
    for its own name meanwhile; so nodes that join at once are late with what they write, and write again."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    replaced: dict[str, Any] = {
        "get_method_name": lambda depth=2: "",
        "construct_and_record_rdzv_event": lambda *facts, **more: None,
    }
    vars(dynamic_rendezvous).update(replaced)


def _wait_for_no_other_program() -> None:
    """torch asks whoever listens at the endpoint for its store, and waits for an answer for ever, where it
    hears no signal either."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    create = c10d_rendezvous_backend._create_tcp_store

    def in_time(parameters: Any) -> Any:
        def give_up() -> None:
            print(f"what listens at {parameters.endpoint} is no rendezvous", file=sys.stderr, flush=True)
            os._exit(EXIT_LOST)

        # To serve the store, and to reach one that others serve, may each take this long.
        timer = threading.Timer(3 * parameters.get_as_int("read_timeout", 60), give_up)
        timer.daemon = True
        timer.start()
        try:
            return create(parameters)
        finally:
            timer.cancel()

    vars(c10d_rendezvous_backend)["_create_tcp_store"] = in_time


def _rendezvous_of_one() -> None:
    """Let torchrun start the ranks of one node without a store that others reach: what its agent writes, it
    alone reads, and the ranks meet in a folder."""
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    class OneNode(RendezvousHandler):
        def __init__(self, parameters: Any) -> None:
            self._run, self._closed = parameters.run_id, False

        def get_backend(self) -> str:
            return ONE_NODE

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

        def is_closed(self) -> bool:
            return self._closed

        def set_closed(self) -> None:
            self._closed = True

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return str(self._run)

        def shutdown(self) -> bool:
            self.set_closed()
            return True

    rendezvous_handler_registry.register(ONE_NODE, OneNode)


def children(parent: int) -> list[int]:
    """Return the process ids of a process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended meanwhile
            if parent_of(int(entry.name)) == parent:
                found.append(int(entry.name))
    return found


def signal_group(process: int, number: int) -> None:
    """Signal a rank and what it started; torchrun makes each rank the leader of a session."""
    try:
        if number == signal.SIGKILL:
            os.killpg(process, number)
        else:
            os.kill(process, number)
    except ProcessLookupError:
        return  # it has ended meanwhile


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
