"""Ranks that die and are started anew, signals to one of them, and a launcher that is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Command, losses, workers_of
from titancli.checkpoint import newest_good
from titancli.runs import RunFolder

pytestmark = pytest.mark.e2e

FAULTY = ("-p", "./faulty.py", "loss=faulty", "loss.rank=1")
SLOW = (*FAULTY, "loss.sleep=0.1", "training.steps=200")


def pid_of_rank(run: Path, rank: int) -> int:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            line, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        is_worker = b"titancli.worker.rank" in line and b"titancli.launchers.agent" not in line
        if is_worker and str(run).encode() in line and f"\0RANK={rank}\0".encode() in b"\0" + environment:
            return int(entry.name)
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("when", "mode"),
    [
        ("mid-step", ()),
        pytest.param("mid-save", (), marks=pytest.mark.slow),  # test_kills.py kills one rank in such a save
        pytest.param("mid-save", ("checkpoint.async_mode=async",), marks=pytest.mark.slow),
    ],
    ids=["mid-step", "mid-save", "mid-save, async"],
)
def test_a_run_whose_rank_died_is_bitwise_the_one_where_none_did(
    command: Callable[..., Command],
    reference: Any,
    here: Path,
    record_property: Callable[[str, object], None],
    when: str,
    mode: tuple[str, ...],
) -> None:
    record_property("kills", {"kills": 1, "when": "of one rank of two"})
    kind = "kill" if when == "mid-step" else "kill_in_save"
    fault = (f"loss.fault={kind}", "loss.call=3", "loss.starts=1", "launcher.max_restarts=3")
    done = command("tiny.toml", *FAULTY, *fault, *mode, "--nproc", "2", "--run-dir", "r").wait(200)
    assert done.code == 0, done.err
    assert "all ranks were restarted (restart 1)" in done.err
    assert "from step-2" in done.err
    assert workers_of(here / "r") == []
    assert not list((here / "r/checkpoints").glob(".*"))
    assert losses(here / "r") == reference(2, "loss=faulty")[0]


def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(
    command: Callable[..., Command], here: Path
) -> None:
    running = command("tiny.toml", *SLOW, "--nproc", "2", "--run-dir", "r")
    running.until_step(here / "r/events.jsonl", 1)
    os.kill(pid_of_rank(here / "r", 1), signal.SIGUSR1)
    done = running.wait()
    assert done.code == 75, done.err
    assert workers_of(here / "r") == []
    outcome = RunFolder(here / "r").outcome()
    assert outcome is not None
    assert (outcome["why"], outcome["signal"]) == ("stopped", "SIGUSR1")
    assert newest_good(here / "r/checkpoints") == here / "r" / outcome["checkpoint"]


def test_a_rendezvous_that_is_lost_is_told_and_the_run_can_be_resumed(
    command: Callable[..., Command], here: Path
) -> None:
    """torchrun holds the store; it is killed, and the ranks save and leave, and the command after them."""
    never = "checkpoint.interval=1000"  # what is there in the end was saved on the way out
    running = command("tiny.toml", *SLOW, never, "--nproc", "2", "--run-dir", "r")
    running.until_step(here / "r/events.jsonl", 2)
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    [agent] = [
        int(child) for child in children if b"launchers.agent" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(agent, signal.SIGKILL)
    done = running.wait()
    assert done.code == 1
    assert workers_of(here / "r") == []
    good = newest_good(here / "r/checkpoints")
    assert good is not None, (here / "r/logs/rank-0.log").read_text()
    assert f"error: torchrun was killed by SIGKILL; its ranks saved checkpoints/{good.name}\n" in done.err
    assert "Traceback" not in done.err
    step = int(good.name.removeprefix("step-"))
    more = ("loss.sleep=0.0", f"training.steps={step + 1}", "-p", "./faulty.py", "--nproc", "2")
    resumed = command("r", "--resume", *more).wait()
    assert resumed.code == 0, resumed.err
    assert f"from step-{step}" in resumed.err
