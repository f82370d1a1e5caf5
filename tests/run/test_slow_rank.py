"""A rank that the others wait for is named."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished
from titancli.observe.events import read_events

pytestmark = pytest.mark.ranks

SECONDS = 0.2  # far more than either rank waits for a processor in half of the steps


def test_a_rank_that_is_slower_is_named_in_the_metrics(train_on: Callable[..., Finished], here: Path) -> None:
    slow = ("loss=faulty", "loss.fault=slow", "loss.rank=1", f"loss.sleep={SECONDS}", "training.steps=8")
    done = train_on(2, "tiny.toml", *slow, "--run-dir", "r")
    assert done.code == 0, done.err
    steps = [e["metrics"] for e in read_events(here / "r/events.jsonl") if e["event"] == "step"]
    assert statistics.mode(metrics["slow_rank"] for metrics in steps[1:]) == 1
    late = statistics.median(metrics["slow_rank_seconds"] for metrics in steps[1:])
    assert SECONDS / 2 < late < 10 * SECONDS
    # All time is in some phase; of single steps only roughly, as the ranks do not read at the same instant.
    phases = sum(metrics[name] for metrics in steps for name in metrics if name.startswith("time/"))
    assert phases == pytest.approx(sum(metrics["step_seconds"] for metrics in steps), rel=0.05)
    assert statistics.median(metrics["time/forward"] for metrics in steps[1:]) > SECONDS / 4


def test_under_a_pipeline_forward_and_backward_are_one_phase(
    train_on: Callable[..., Finished], here: Path
) -> None:
    done = train_on(2, "tiny.toml", "mesh.pp=2", "training.steps=2", "--run-dir", "r")
    assert done.code == 0, done.err
    [_, last] = [e["metrics"] for e in read_events(here / "r/events.jsonl") if e["event"] == "step"]
    assert 0.0 < last["time/forward_backward"] < last["step_seconds"]
    assert not {"time/forward", "time/backward"} & set(last)
