"""What tests of runs on several nodes share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.run.conftest import Command
from titancli.observe.events import read_events

FAULTY = ("-p", "./faulty.py", "loss=faulty")
PATIENT = ("launcher.max_restarts=3", "launcher.node_timeout_seconds=8", "comm.train_timeout_seconds=4")
SLOW = ("loss.sleep=0.3", "training.steps=12")

Start = Callable[..., Command]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_step(run: Path, step: int, commands: list[Command], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not any(e["event"] == "step" and e["step"] >= step for e in read_events(run / "events.jsonl")):
        assert time.monotonic() < deadline and all(c.process.poll() is None for c in commands)
        time.sleep(0.05)


def worlds(run: Path) -> list[int]:
    """The number of ranks of each start."""
    return [e["world"] for e in read_events(run / "events.jsonl") if e["event"] == "run_start"]
