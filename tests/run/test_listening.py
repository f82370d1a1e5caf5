"""What a run on one machine offers to the network: nothing. torch unpickles what lies in its stores."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import Cluster
from tests.run.conftest import Command, losses
from titancli.errors import EnvironmentProblem
from titancli.process import loopback_only, own_folder, require_locks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="sockets are listed from /proc"),
]
MARK = "TITAN_TEST_TREE"


def processes(mark: str) -> list[Path]:
    """All that a command with this mark in its environment has started, whoever its parent is by now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
        except OSError:  # it has ended, or is another user's
            continue
    return found


def listening(mark: str) -> set[str]:
    """Addresses at which processes of a tree take connections."""
    held = set()
    for process in processes(mark):
        try:
            descriptors = list((process / "fd").iterdir())
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                held.add(os.readlink(descriptor))
            except OSError:
                continue
    found = set()
    for table in {table for process in processes(mark) for table in (process / "net").glob("tcp*")}:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                found.add(str(address(fields[1].partition(":")[0])))
    return found


def address(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel writes each four bytes as one number of this machine."""
    raw = bytes.fromhex(digits)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    found = ipaddress.ip_address(raw)
    return getattr(found, "ipv4_mapped", None) or found


def assert_nothing_outside(mark: str) -> None:
    assert len(processes(mark)) >= 1
    outside = {found for found in listening(mark) if not ipaddress.ip_address(found).is_loopback}
    assert not outside


def rank(run: Path, number: int, other_than: int = 0) -> int:
    """The process of a rank that has begun to write its log."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                variables = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"titancli.worker.rank" in words and os.fsencode(run) in words:
                mine = f"RANK={number}".encode() in variables and b"titancli.launchers.agent" not in words
                if mine and int(process.name) != other_than:
                    return int(process.name)
        time.sleep(0.05)
    raise AssertionError(f"there was no rank {number}")


def test_two_ranks_listen_to_this_machine_alone_also_after_a_restart(here: Path) -> None:
    slow = ("-p", "./faulty.py", "loss.type=faulty", "loss.sleep=0.1", "training.steps=40")
    command = Command(
        here,
        *("tiny.toml", "--run-dir", str(here / "r"), "--nproc", "2", "launcher.max_restarts=2", *slow),
        env={**os.environ, MARK: "restarts"},
    )
    events = here / "r" / "events.jsonl"
    for step in (2, 6, 10):
        command.until_step(events, step)
        assert_nothing_outside("restarts")
        if step < 10:
            os.kill(rank(here / "r", 1), signal.SIGKILL)
    done = command.wait()
    assert done.code == 0, done.err
    assert max(losses(here / "r")) == 40 and "(restart 2)" in (here / "r/logs/rank-0.log").read_text()
    assert not processes("restarts")


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_the_name_of_the_machine_means_an_address_that_others_reach(
    here: Path, cluster: Cluster, ranks: int
) -> None:
    """As on most machines of a cluster: gloo listens at that address, if it is not told another."""
    slow = ("-p", "./faulty.py", "loss.type=faulty", "loss.sleep=0.05", "training.steps=100")
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_IFNAME")}
    for chosen, expected in ({}, True), ({"GLOO_SOCKET_IFNAME": "eth0"}, False):
        mark = f"named-{ranks}-{len(chosen)}"
        words = ("tiny.toml", "--run-dir", str(here / mark), "--nproc", str(ranks), *slow)
        command = Command(here, *words, env={**variables, **chosen, MARK: mark}, on=cluster.node("a"))
        command.until_step(here / mark / "events.jsonl", 2)
        found = [ipaddress.ip_address(text) for text in listening(mark)]
        assert found and all(address.is_loopback for address in found) == expected
        command.process.send_signal(signal.SIGTERM)
        assert command.wait().code == 75


def test_ranks_that_meet_those_of_other_runs_listen_where_these_are() -> None:
    from titan_ft import FaultTolerant
    from titancli.loops import Pretrain

    loops: tuple[Any, ...] = (FaultTolerant, Pretrain)
    assert [loop.joins_other_runs for loop in loops] == [True, False]


def test_an_interface_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert loopback_only() == {"NCCL_SOCKET_IFNAME": "=lo"}


def test_cleaners_of_temporary_folders_leave_the_meeting_place_alone() -> None:
    """systemd-tmpfiles passes over a folder that it cannot lock; the ranks of a restart meet there."""
    with own_folder() as folder:
        other = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
    assert not folder.exists()


def test_a_disk_without_locks_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre is, mounted without them; no disk here is."""

    def flock(file: Any, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    require_locks(tmp_path)
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(EnvironmentProblem, match=r"can be locked \(Function not implemented\)") as told:
        require_locks(tmp_path)
    assert "TMPDIR" in str(told.value.hint)
    with own_folder() as folder:  # in which nobody meets
        assert folder.is_dir()
