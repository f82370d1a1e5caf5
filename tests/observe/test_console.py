"""What people see."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from titancli.observe.console import Console, JsonLines, duration, status_line


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "steps": 100, "metrics": metrics}


def test_the_status_line_tells_rewards_where_there_are_some() -> None:
    rewards = {"reward": 0.41234, "solved": 0.25, "eval_solved": 0.5, "reward_failed": 3.0}
    line = status_line(step(10, loss=0.5, **rewards))
    assert "loss 0.5000  reward 0.412  solved 25%  eval 50%  3 rewards failed  ETA" in line
    assert "rewards failed" not in status_line(step(10, **{**rewards, "reward_failed": 0.0}))


def test_the_status_line_has_everything_and_a_dash_for_what_is_unknown() -> None:
    line = status_line(
        step(
            10,
            loss=3.21412,
            grad_norm=0.8721,
            lr=3e-4,
            tokens_per_second=21345.0,
            memory_gib=1.23,
            eta_seconds=42.0,
        )
    )
    assert line == (
        "step 10/100  loss 3.2141  grad norm 0.872  lr 3.00e-04  21.3k tokens/s  1.2 GiB  ETA 0:42"
    )
    assert "MFU 41.2%" in status_line(step(10, mfu=0.412))
    assert status_line(step(1, loss=2.0)).endswith("ETA —")


def test_a_loss_that_is_no_number_is_shown() -> None:
    assert "loss nan" in status_line(step(1, loss="NaN"))


def test_steps_that_were_skipped_are_counted() -> None:
    assert "2 skipped" in status_line(step(10, loss=2.0, skipped_steps=2.0))
    assert "skipped" not in status_line(step(10, loss=2.0, skipped_steps=0.0))


def test_an_evaluation_has_a_line_of_its_own() -> None:
    stream = io.StringIO()
    console = Console(stream, live=False)
    metrics = {"validation/pairs/loss": 0.5, "validation/pairs/reward_accuracy": 0.75}
    console({"event": "validation", "step": 20, "seconds": 1.0, "metrics": metrics})
    assert stream.getvalue() == "validation at step 20: pairs loss 0.5000, reward accuracy 0.75\n"


def test_a_terminal_has_one_line_that_updates() -> None:
    stream = io.StringIO()
    console = Console(stream, live=True)
    console(step(1, loss=3.0))
    console(step(2, loss=2.0))
    assert "\n" not in stream.getvalue()
    console({"event": "checkpoint", "step": 2, "path": "/x/step-2"})
    console({"event": "run_end", "why": "finished"})
    assert stream.getvalue().count("\r") == 3
    assert stream.getvalue().split("\r\x1b[K")[3].startswith("saved step-2\nstep 2/100")
    assert stream.getvalue().endswith("\n")


def test_no_terminal_gets_plain_lines() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console(
        {
            "event": "run_start",
            "device": "CPU",
            "world": 2,
            "mesh": {"dp_shard": 2, "tp": 1},
            "checkpoint": None,
        }
    )
    console(step(1, loss=3.0))
    console({"event": "log", "level": "warning", "message": "odd"})
    console({"event": "run_end", "why": "finished"})
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert lines[0] == "training on CPU, 2 ranks (dp_shard 2)"
    assert lines[2] == "warning: odd"
    assert len(lines) == 3


def test_a_narrow_terminal_gets_what_matters_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    Console(stream, live=True)(step(1, loss=3.0, grad_norm=1.0, lr=1e-3, tokens_per_second=1e5))
    assert stream.getvalue() == "\r\x1b[Kstep 1/100  loss 3.0000  ETA —"
    monkeypatch.setenv("COLUMNS", "10")
    Console(stream, live=True)(step(1, loss=3.0))
    assert stream.getvalue().endswith("\r\x1b[Kstep 1/10")


def test_a_terminal_of_eighty_columns_shows_how_long_it_takes() -> None:
    event = step(
        10, loss=3.2, grad_norm=0.87, lr=3e-4, tokens_per_second=21345.0, memory_gib=1.2, eta_seconds=42.0
    )
    assert status_line(event, 79) == (
        "step 10/100  loss 3.2000  grad norm 0.870  21.3k tokens/s  1.2 GiB  ETA 0:42"
    )


def test_a_terminal_without_a_dash_gets_a_question_mark() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream, live=False)(step(1, loss=3.0))
    assert b"ETA ?" in raw.getvalue()


def test_json_lines_are_the_events_themselves() -> None:
    stream = io.StringIO()
    JsonLines(stream)(step(1, loss=3.0))
    assert json.loads(stream.getvalue()) == step(1, loss=3.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (273906, "3d 4:05:06"), (86460, "1d 0:01:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
