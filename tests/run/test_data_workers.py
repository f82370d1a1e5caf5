"""Runs whose batches are prepared by worker processes, and recipes whose workers could not help."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data import slow_plugin
from tests.run.conftest import Finished, losses
from titancli.observe.events import read_events

TOKENS = (
    "dataset.type=token_shards",
    'dataset.paths=["text.txt"]',
    "dataset.format=raw",
    "dataset.dtype=uint8",
)
NUM_WORKERS = "training.dataloader.num_workers"


def test_losses_are_those_without_workers_and_so_are_they_after_a_resume(
    train: Callable[..., Finished], here: Path
) -> None:
    schedule = ("lr_scheduler.total_steps=6", "--run-dir")
    assert train("tiny.toml", *TOKENS, *schedule, "plain").code == 0
    assert train("tiny.toml", *TOKENS, *schedule, "half", f"{NUM_WORKERS}=2", "training.steps=3").code == 0
    more = ("training.steps=6", f"{NUM_WORKERS}=1", "training.dataloader.prefetch_factor=5")
    assert train("half", "--resume", *more).code == 0
    assert losses(here / "half") == losses(here / "plain")
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_ends_the_run_as_bad_data_do(train: Callable[..., Finished], here: Path) -> None:
    shutil.copy(slow_plugin.__file__, here / "slow.py")
    slow = ("-p", "./slow.py", "dataset.type=slow", f"{NUM_WORKERS}=2", "--run-dir", "r")
    ended = train("tiny.toml", *slow, "dataset.seconds=0.005", "dataset.at=9", "dataset.then=die")
    assert ended.code == 5 and "killed by SIGKILL while it prepared rows 8 to 9" in ended.err
    assert not multiprocessing.active_children()
    assert len(losses(here / "r")) == 4
    assert all(
        "data_wait_share" in e["metrics"]
        for e in read_events(here / "r/events.jsonl")
        if e["event"] == "step"
    )


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("tiny.toml", "text_files tokenizes all rows before a row, so each worker would prepare all"),
        ("grpo_digit", "the loop uses no dataset"),
    ],
)
def test_workers_that_could_not_help_are_refused(
    train: Callable[..., Finished], here: Path, recipe: str, said: str
) -> None:
    ended = train(recipe, f"{NUM_WORKERS}=2")
    assert ended.code == 3 and said in ended.err
    assert not (here / "runs").exists()
