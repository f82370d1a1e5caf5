"""A rank that the others wait for is named."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished
from titancli.observe.events import read_events

pytestmark = pytest.mark.ranks


def test_a_rank_that_is_50_ms_slower_is_named_in_the_metrics(
    train_on: Callable[..., Finished], here: Path
) -> None:
    slow = ("loss=faulty", "loss.fault=slow", "loss.rank=1", "loss.sleep=0.05", "training.steps=16")
    done = train_on(2, "tiny.toml", *slow, "--run-dir", "r")
    assert done.code == 0, done.err
    steps = [e["metrics"] for e in read_events(here / "r/events.jsonl") if e["event"] == "step"]
    assert statistics.mode(metrics["slow_rank"] for metrics in steps[1:]) == 1
    late = statistics.median(metrics["slow_rank_seconds"] for metrics in steps[1:])
    assert 0.04 < late < 0.2
