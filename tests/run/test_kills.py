"""A run that is killed again and again while it saves ends as one that nothing happened to."""

from __future__ import annotations

import gc
import os
import random
import signal
import statistics
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished, losses, train_here
from tests.run.test_skipped_steps import contents
from titancli.checkpoint import newest_good, read_manifest
from titancli.observe.events import read_events

pytestmark = pytest.mark.ranks

KILLS = 10
"""In each mode."""
STEPS = 3 * KILLS + 4
RECIPE = ("loss=faulty", f"training.steps={STEPS}", "checkpoint.interval=1")


def seconds_of_a_save(run: Path) -> float:
    """From the end of a step to its checkpoint, by the event log."""
    times = {
        (e["event"], e["step"]): datetime.fromisoformat(e["time"])
        for e in read_events(run / "events.jsonl")
        if e["event"] in ("step", "checkpoint")
    }
    return statistics.median(
        (times["checkpoint", step] - times["step", step]).total_seconds() for step in range(2, STEPS)
    )


def killed(*arguments: str) -> None:
    """Run in a copy of this process, in which torch need not be imported again, until it is killed."""
    gc.collect()
    child = os.fork()
    if child == 0:
        gc.freeze()  # process groups are not collected here: their threads are not there to be waited for
        try:
            train_here(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.slow), "async"])
def test_a_run_killed_in_its_saves_at_20_random_moments_ends_bit_for_bit_as_if_it_had_not(
    train: Callable[..., Finished],
    reference: Any,
    here: Path,
    record_property: Callable[[str, object], None],
    mode: str,
) -> None:
    how = "as it goes on" if mode == "async" else "while it waits"
    record_property("kills", {"kills": KILLS, "when": f"of a run in its saves, {how}"})
    expected, whole = reference(1, *RECIPE)
    longest, chance = seconds_of_a_save(whole), random.Random(mode)
    line = ("tiny.toml", "--run-dir", "r", "--resume", "-p", "./faulty.py", *RECIPE)
    step = 0
    for _ in range(KILLS):
        after = chance.uniform(0, longest)
        fault = ("loss.fault=kill_in_save", "loss.call=2", f"loss.after={after}")
        killed(*line, f"checkpoint.async_mode={mode}", *fault)
        good = newest_good(here / "r/checkpoints")
        found = read_manifest(good).step if good else 0
        assert found >= step
        step = found
    done = train(*line)
    assert done.code == 0, done.err
    assert losses(here / "r") == expected
    last = f"checkpoints/step-{STEPS}"
    assert contents(here / "r" / last) == contents(whole / last)
    assert read_manifest(here / "r" / last).state == read_manifest(whole / last).state
    assert not list((here / "r/checkpoints").glob(".*"))
