"""Steps whose numbers go wrong, in whole runs: told, counted, resumed over, and too many of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished
from titancli.checkpoint import CheckpointReader
from titancli.observe.events import read_events
from titancli.runs import RunFolder

Train = Callable[..., Finished]
FAULTY = ("-p", "./faulty.py", "loss=faulty")
SAVED = ("checkpoint.interval=1", "checkpoint.keep_latest_k=0")
NOT_FINITE = "the loss and the gradient norm are not finite"


def step_metrics(run: Path) -> dict[int, dict[str, Any]]:
    events = read_events(run / "events.jsonl")
    return {event["step"]: event["metrics"] for event in events if event["event"] == "step"}


def contents(checkpoint: Path, prefix: str = "") -> dict[str, bytes]:
    """A checkpoint's tensors, byte for byte."""
    import torch

    reader = CheckpointReader(checkpoint, prefix=prefix)
    return {
        name: reader.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name in reader.names()
    }


def test_a_skipped_step_is_told_counted_and_shown(train: Train, here: Path) -> None:
    done = train("tiny.toml", *FAULTY, "loss.fault=not_finite", "--run-dir", "r")
    assert done.code == 0, done.err
    assert done.err.count(f"warning: step 3 was skipped: {NOT_FINITE}") == 1
    told = step_metrics(here / "r")
    assert [told[step]["skipped_steps"] for step in range(1, 7)] == [0, 0, 1, 1, 1, 1]
    assert told[3]["loss"] == "NaN"
    lines = {line.split()[1]: line for line in done.err.splitlines() if line.startswith("step ")}
    assert "skipped" not in lines["2/6"]
    assert "1 skipped" in lines["4/6"]


def test_too_many_in_a_row_end_the_run_with_the_weights_before_them(train: Train, here: Path) -> None:
    wrong = ("loss.fault=not_finite", "loss.until=100", "stability.max_skips=3")
    done = train("tiny.toml", *FAULTY, *wrong, *SAVED, "--run-dir", "r")
    assert done.code == 1
    assert (
        "error: 3 steps in a row were skipped, up to step 5: the loss and the gradient norm are not finite"
        in done.err
    )
    assert (
        "checkpoints/step-5 holds the weights of step 2 and continues with the data after step 5" in done.err
    )
    assert "Traceback" not in done.err
    outcome = RunFolder(here / "r").outcome()
    assert outcome is not None
    assert (outcome["why"], outcome["step"]) == ("failed", 5)
    before, after = (contents(here / f"r/checkpoints/step-{step}") for step in (2, 5))
    assert before == after
    position = [
        json.dumps(CheckpointReader(here / f"r/checkpoints/step-{step}").manifest.state["data"])
        for step in (2, 5)
    ]
    assert position[0] != position[1]
    done = train("r", "--resume", "-p", "./faulty.py", "loss.fault=none")
    assert done.code == 0, done.err
    assert [step_metrics(here / "r")[step]["skipped_steps"] for step in (2, 5, 6)] == [0, 3, 3]


@pytest.mark.parametrize("fault", ["not_finite", "spike"])
def test_a_run_that_was_resumed_skips_what_the_whole_one_skips(train: Train, here: Path, fault: str) -> None:
    """A fault at step 3, before the resume; a spike, whose window must be remembered, at step 5, after it."""
    window = ("stability.window=2", "stability.sigma=8")
    whole = (f"loss.fault={fault}", "loss.call=3" if fault == "not_finite" else "loss.call=5")
    resumed = () if fault == "not_finite" else ("loss.call=1",)
    for name in ("whole", "halves"):
        assert train("tiny.toml", *FAULTY, *window, *whole, "--run-dir", name).code == 0
    (here / "halves/events.jsonl").unlink()
    for path in (here / "halves/checkpoints/step-6").iterdir():
        path.unlink()
    (here / "halves/checkpoints/step-6").rmdir()
    done = train("halves", "--resume", "-p", "./faulty.py", *resumed)
    assert done.code == 0, done.err
    assert "from step-4" in done.err
    expected, found = step_metrics(here / "whole"), step_metrics(here / "halves")
    for step in (5, 6):
        for name in ("loss", "grad_norm", "skipped_steps", "lr"):
            assert found[step][name] == expected[step][name], (step, name)
    assert found[6]["skipped_steps"] == 1
    first, second = here / "whole/checkpoints/step-6", here / "halves/checkpoints/step-6"
    assert contents(first) == contents(second)
    assert CheckpointReader(first).manifest.state == CheckpointReader(second).manifest.state


@pytest.mark.ranks
def test_two_ranks_stop_together_when_one_of_them_goes_wrong(
    train_on: Callable[..., Finished], here: Path
) -> None:
    wrong = ("loss.fault=not_finite", "loss.rank=1", "loss.until=100", "stability.max_skips=2")
    done = train_on(2, "tiny.toml", "loss=faulty", *wrong, "--run-dir", "r")
    assert done.code == 1
    assert done.err.count(f"warning: step 3 was skipped: {NOT_FINITE}") == 1
    assert "2 steps in a row were skipped, up to step 4" in done.err
    assert "Traceback" not in done.err
    before, after = (contents(here / f"r/checkpoints/step-{step}") for step in (2, 4))
    assert before == after


def test_a_step_that_is_computed_twice_and_differs_ends_the_run_before_it(train: Train, here: Path) -> None:
    flip = ("loss.fault=flip", "loss.call=4", 'callbacks=[{type="recheck",every=3}]')  # its second pass
    done = train("tiny.toml", *FAULTY, *flip, *SAVED, "--run-dir", "r")
    assert done.code == 1
    assert "step 3 was computed twice from the same state, and rank 0 (host " in done.err
    assert "device cpu) computed different numbers; the first that differs is the output of " in done.err
    assert sorted(path.name for path in (here / "r/checkpoints").glob("step-*")) == ["step-1", "step-2"]
    resumed = train(
        "r", "--resume", "-p", "./faulty.py", "loss.call=99", 'callbacks=[{type="recheck",every=1}]'
    )
    assert resumed.code == 0
    sound = train("tiny.toml", *FAULTY, "loss.call=99", "loss.fault=flip", "--run-dir", "s", *SAVED)
    assert sound.code == 0
    last = max((here / "s/checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    assert contents(here / "r/checkpoints" / last.name) == contents(last)
