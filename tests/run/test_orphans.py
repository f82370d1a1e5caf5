"""Whatever is killed with SIGKILL at whatever moment of a start: no process of the run remains."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.run.conftest import Command
from tests.run.test_listening import MARK, processes
from titancli import process as own

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="the death of a parent is signalled on Linux alone"),
]


class Start:
    """A run of two ranks that would train for days, seen from outside."""

    def __init__(self, here: Path, mark: str) -> None:
        self.here, self.mark = here, mark
        words = ("tiny.toml", "--run-dir", "r", "--nproc", "2", "training.steps=1000000")
        self.command = Command(here, *words, "checkpoint.interval=1000000", env={**os.environ, MARK: mark})

    def until(self, condition: Callable[[], list[int]], seconds: float = 90.0) -> list[int]:
        """Wait for a state, without a pause: it may be short."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline and self.command.process.poll() is None
        return found

    def agents(self) -> list[int]:
        return children(self.command.process.pid, b"titancli.launchers.agent")

    def ranks(self) -> list[int]:
        return [rank for agent in self.agents() for rank in children(agent, b"titancli.worker.rank")]

    def both_ranks(self) -> list[int]:
        return self.ranks() if len(self.ranks()) == 2 else []

    def met(self) -> list[int]:
        """A rank stands where ranks meet, and waits there."""
        [agent] = self.agents()
        words = Path(f"/proc/{agent}/cmdline").read_bytes().split(b"\0")
        store = Path(os.fsdecode(words[words.index(b"--store") + 1]))
        return self.ranks() if (store / "start-0").exists() else []

    def trains(self) -> list[int]:
        events = self.here / "r" / "events.jsonl"
        return self.ranks() if events.exists() and '"step"' in events.read_text() else []


def children(parent: int, module: bytes) -> list[int]:
    """Its children that run a module, from the first moment on."""
    try:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [int(pid) for pid in found if module in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except OSError:
        return []


def torch_is_loaded(process: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return False


@pytest.fixture
def start(here: Path) -> Iterator[Start]:
    started = Start(here, here.name)
    yield started
    for process in processes(started.mark):
        os.kill(int(process.name), signal.SIGKILL)
    started.command.process.kill()
    started.command.process.wait()


def kill(start: Start, killed: int, frozen: list[int]) -> None:
    """Kill while others stand still, wherever they are, and see that all come to their end."""
    for process in frozen:
        os.kill(process, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    start.command.process.poll()
    for process in frozen:
        os.kill(process, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while remaining := processes(start.mark):
        assert time.monotonic() < deadline, [p.joinpath("cmdline").read_bytes() for p in remaining]
        start.command.process.poll()  # it may be a zombie
        time.sleep(0.05)


@pytest.mark.cold
def test_the_command_is_killed_when_its_agent_has_hardly_begun(start: Start) -> None:
    kill(start, start.command.process.pid, start.until(start.agents))


@pytest.mark.cold
def test_the_command_is_killed_while_its_agent_loads_torch(start: Start) -> None:
    start.until(lambda: [agent for agent in start.agents() if torch_is_loaded(agent)])
    kill(start, start.command.process.pid, start.agents())


@pytest.mark.cold
def test_the_agent_is_killed_when_a_rank_has_hardly_begun(start: Start) -> None:
    ranks = start.until(start.ranks)
    kill(start, start.agents()[0], ranks)


def test_the_agent_is_killed_when_one_rank_waits_for_the_other(start: Start) -> None:
    _, second = start.until(start.both_ranks)
    os.kill(second, signal.SIGSTOP)
    start.until(start.met)
    kill(start, start.agents()[0], [second])


@pytest.mark.parametrize("who", ["command", "agent"])
def test_one_of_them_is_killed_when_the_ranks_train(start: Start, who: str) -> None:
    start.until(start.trains)
    kill(start, start.command.process.pid if who == "command" else start.agents()[0], [])


def test_of_a_direct_child_nothing_is_asked_of_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process namespace of its own under the /proc of another, numbers there are other processes'."""
    monkeypatch.setattr(own, "parent_of", lambda number: 0)
    assert not own._is_orphaned(os.getppid())
    assert own._is_orphaned(os.getpid())
