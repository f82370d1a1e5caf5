"""A plugin's learning rate schedule in a run: the one of docs/plugins.md, resumed, and one that fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished
from titan_testing import run_cli

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
USE = ("-p", "./inverse_sqrt.py", "lr_scheduler=inverse_sqrt", "lr_scheduler.warmup_steps=2")


def plugin() -> str:
    block = re.search(r"<!-- file: inverse_sqrt.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block
    return block[1]


def rates(run: Path) -> list[float]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["metrics"]["lr"] for event in events if event["event"] == "step"]


def test_the_example_of_the_docs_trains_and_resumes(train: Callable[..., Finished], tmp_path: Path) -> None:
    Path("inverse_sqrt.py").write_text(plugin())
    line = ("tiny.toml", *USE, "optimizer.lr=0.001", "metrics.log_freq=1", "--run-dir", "r")
    assert train(*line, "training.steps=2").code == 0
    assert train(*line, "training.steps=4", "--resume").code == 0
    expected = [0.5, 1.0, (2 / 3) ** 0.5, (2 / 4) ** 0.5]
    assert rates(Path("r")) == pytest.approx([0.001 * factor for factor in expected])


def test_one_that_gives_nothing_at_its_end_takes_no_step(train: Callable[..., Finished]) -> None:
    body = plugin().replace("return lambda step: min", "return lambda step: None if step == 3 else min")
    Path("late.py").write_text(body.replace("inverse_sqrt", "late"))  # a module of another name: one process
    done = train("tiny.toml", "-p", "./late.py", "lr_scheduler=late", "training.steps=4", "--run-dir", "r")
    assert done.code == 4
    assert "the schedule late/late gave None at step 3" in done.err
    check = run_cli(
        "validate", "--strict", "tiny.toml", "-p", "./late.py", "lr_scheduler=late", "training.steps=4"
    )
    assert check.code == 4 and "gave None at step 3" in check.stderr
