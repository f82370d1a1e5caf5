"""Where the time went in a real run with planted delays: each is charged to its cause."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from report_delays import SECONDS, STALL

from tests.run.conftest import Command, command, here  # noqa: F401 - fixtures
from titan_report import view
from titan_report.history import seconds_of
from titancli.observe.events import read_events
from titancli.observe.summary import summarize

pytestmark = pytest.mark.e2e

PLANTED = SECONDS * 0.9  # an event and a phase are not read at the same instant

RECIPE = """
extends = "tiny.toml"
converters = ["delays"]
loggers = ["delays"]
loss = "delays"
optimizer = "delays"
[dataset]
type = "delays"
[validation]
freq = 100
[validation.datasets.held_out]
type = "text_files"
paths = ["text.txt"]
repeat = false
[model]
n_layers = 1
[training]
steps = 8
[checkpoint]
interval = 4
[debug]
digests = false  # which convert each weight as a save does
"""


def test_planted_delays_are_charged_to_their_causes(
    here: Path,  # noqa: F811
    command: Callable[..., Command],  # noqa: F811
) -> None:
    shutil.copy(Path(__file__).with_name("report_delays.py"), here / "delays.py")
    (here / "slow.toml").write_text(RECIPE)
    (here / "text.txt").write_text("".join(f"line {n} of a text that is not long\n" for n in range(40)))
    done = command("./slow.toml", "-p", "./delays.py", "--run-dir", "r").wait()
    assert done.code == -signal.SIGKILL, done.err
    done = command("r", "--resume", "-p", "./delays.py").wait()
    assert done.code == 0, done.err

    (run,) = view.open_runs([summarize(here / "r")])
    times = run.history.times.seconds
    events = read_events(here / "r" / "events.jsonl")
    kept = {event["step"]: event["metrics"] for event in events if event["event"] == "step"}
    clipped = sum(metrics["time/clip"] for metrics in kept.values())
    for name in ("data", "forward", "backward", "optimizer"):
        each = sorted(metrics[f"time/{name}"] for metrics in kept.values())
        assert each[-1] >= PLANTED > each[len(each) // 2], name
        # Clipping counts as part of the optimizer.
        both = sum(each) + (clipped if name == "optimizer" else 0.0)
        assert times[name] == pytest.approx(both, abs=SECONDS / 2), name
    for name in ("save", "evaluation", "lost"):  # together with the others they are all time, see below
        assert times[name] >= PLANTED, name
    assert times["stall"] >= STALL / 2  # without what passes between two steps as a rule
    first, second = (event for event in events if event["event"] == "run_start")
    started = [seconds_of(attempt["started"]) for attempt in run.summary.attempts]
    assert times["start"] == pytest.approx(seconds_of(first["time"]) - started[0])
    assert times["restart"] == pytest.approx(seconds_of(second["time"]) - started[1])
    ended = seconds_of(run.summary.attempts[-1]["ended"])
    assert sum(times.values()) == pytest.approx(ended - started[0])
    assert run.history.repeated == 2 and list(run.history.step) == [0, *range(1, 9)]
