"""`-q` and `-v` in a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.run.conftest import Finished

Train = Callable[..., Finished]


def test_a_quiet_run_says_nothing_but_warnings(train: Train, here: Path) -> None:
    done = train("tiny.toml", "training.steps=2", "--run-dir", "r", "-q")
    said = [line for line in done.err.splitlines() if not line.startswith("[W")]  # torch's own, from C++
    assert (done.code, done.out, said) == (0, "", [])
    assert (here / "r/events.jsonl").is_file()


def test_a_quiet_run_still_says_why_it_failed(train: Train) -> None:
    done = train("tiny.toml", "-p", "./faulty.py", "loss=faulty", "loss.fault=advice", "-q")
    assert done.code == 1
    assert done.err == "error: the teacher does not answer\n start it first\n"


def test_the_next_command_speaks_again(train: Train) -> None:
    train("tiny.toml", "--dry-run", "-q")
    done = train("tiny.toml", "training.steps=2", "--run-dir", "r")
    assert "run folder: r" in done.err and "loss" in done.err
