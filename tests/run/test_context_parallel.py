"""`titan train` with rows that are cut over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Command, losses

pytestmark = pytest.mark.e2e

EXACT = (
    "training.mixed_precision_param=float32",
    "training.global_batch_size=4",
    "lr_scheduler.total_steps=6",
)
TWO = ("--nproc", "2")


@pytest.mark.slow  # parallel/test_context.py has it of an engine
def test_a_run_on_parts_of_rows_goes_on_with_whole_rows(command: Callable[..., Command], here: Path) -> None:
    whole = command("tiny.toml", *EXACT, "training.steps=4", "--run-dir", "whole").wait()
    assert whole.code == 0, whole.err
    cut = ("mesh.cp=2", "parallelize.context_parallel=ring")
    begun = command("tiny.toml", *EXACT, *cut, "training.steps=2", *TWO, "--run-dir", "r").wait()
    assert begun.code == 0, begun.err
    assert "2 ranks (cp 2)" in begun.err
    others = ("mesh.cp=1", "mesh.dp_shard=2", "training.steps=4")
    resumed = command("r", "--resume", *others, *TWO).wait()
    assert resumed.code == 0, resumed.err
    assert losses(here / "r") == pytest.approx(losses(here / "whole"), rel=1e-5)
