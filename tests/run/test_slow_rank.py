"""A rank that the others wait for is named."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Command
from titancli.observe.events import read_events

pytestmark = pytest.mark.e2e


def test_a_slow_rank_is_named_in_the_metrics_and_once_in_words(
    command: Callable[..., Command], here: Path
) -> None:
    slow = ("-p", "./faulty.py", "loss=faulty", "loss.fault=slow", "loss.rank=1", "loss.sleep=0.3")
    done = command("tiny.toml", *slow, "--nproc", "2", "--run-dir", "r", "training.steps=9").wait()
    assert done.code == 0, done.err
    steps = [e["metrics"] for e in read_events(here / "r/events.jsonl") if e["event"] == "step"]
    assert statistics.mode(metrics["slow_rank"] for metrics in steps[1:]) == 1
    late = statistics.median(metrics["slow_rank_seconds"] for metrics in steps[1:])
    assert 0.2 < late < 0.6
    assert done.err.count("warning: rank 1 is slower than the others: by ") == 1
