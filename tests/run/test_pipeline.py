"""`titan train` with pipeline stages, as users run it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Command, losses
from titancli.torch_version import SPLIT_BACKWARD, lacks

pytestmark = pytest.mark.e2e


def norms(run: Path) -> dict[int, float]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {e["step"]: e["metrics"]["grad_norm"] for e in events if e["event"] == "step"}


def test_a_run_in_stages_shows_its_loss_and_goes_on_bit_for_bit_and_on_another_layout(
    command: Callable[..., Command], here: Path
) -> None:
    schedule = "LoopedBFS" if lacks(SPLIT_BACKWARD) else "ZBVZeroBubble"
    stages = ("mesh.pp=2", f"pipeline.schedule={schedule}", "model.n_layers=4")
    done = command("tiny.toml", *stages, "--nproc", "2", "--run-dir", "r").wait()
    assert done.code == 0, done.err
    assert "2 ranks (pp 2)" in done.err
    first, *_, last = losses(here / "r").values()
    assert 0 < last < first
    for other in ("same", "one"):
        shutil.copytree(here / "r", here / other)
    resumed = command("same", "--resume", "--step", "4", "--nproc", "2").wait()
    assert resumed.code == 0, resumed.err
    assert losses(here / "same") == losses(here / "r") and norms(here / "same") == norms(here / "r")
    elsewhere = command("one", "--resume", "--step", "4", "mesh.pp=1").wait()
    assert elsewhere.code == 0, elsewhere.err
    assert losses(here / "one") == pytest.approx(losses(here / "r"), rel=1e-5)
    assert norms(here / "one") == pytest.approx(norms(here / "r"), rel=1e-4)
