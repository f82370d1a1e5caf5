"""Runs on token shards: the losses of live tokenizing, resumed, and exit code 5 before the first step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data import slow_plugin
from tests.run.conftest import Finished, losses
from titancli.data import ByteTokenizer
from titancli.data.shards.sources import Options, open_inputs
from titancli.data.shards.tokenize import Job, tokenize
from titancli.observe.events import read_events

SHARDS = ("dataset.type=token_shards", 'dataset.paths=["out"]')


def test_losses_are_those_of_live_tokenizing(here: Path, train: Callable[..., Finished]) -> None:
    tokenize(Job(open_inputs(["text.txt"], Options()), ByteTokenizer(), here / "out", 1 << 20, 1))
    options = ("training.steps=4", "metrics.log_freq=1", "checkpoint.interval=2")
    assert train("tiny.toml", "--run-dir", "live", *options).code == 0
    done = train("tiny.toml", "--run-dir", "shards", *options, *SHARDS, 'dataset.shuffle="off"')
    assert done.code == 0, done.err
    assert losses(here / "live") == losses(here / "shards")

    whole = train("tiny.toml", "--run-dir", "whole", *options, *SHARDS)
    assert whole.code == 0, whole.err
    assert train("tiny.toml", "--run-dir", "half", *options, *SHARDS, "training.steps=2").code == 0
    assert train("half", "--resume", "training.steps=4").code == 0
    assert losses(here / "half") == losses(here / "whole")
    digests = {}
    for run in ("live", "shards", "half", "whole"):
        [*_, attempt] = json.loads((here / run / "run.json").read_text())["attempts"]
        digests[run] = attempt["data_digest"]
    assert digests["half"] == digests["whole"] and len(set(digests.values())) == 3

    os.truncate(here / "out" / "00000.bin", 101)
    refused = train("tiny.toml", "--run-dir", "bad", *options, *SHARDS)
    assert refused.code == 5
    assert "00000.bin is truncated at byte 101" in refused.err
    assert not losses(here / "bad")


def test_each_dataset_of_a_mixture_has_a_loss(
    here: Path, train_on: Callable[..., Finished], train: Callable[..., Finished]
) -> None:
    (here / "other.txt").write_text("another text " * 3000)
    (here / "mix.toml").write_text(
        'extends = "tiny.toml"\n[dataset]\ntype = "mix"\nweights = { own = 3, other = 1 }\n'
        '[dataset.datasets]\nown = { type = "text_files", paths = ["text.txt"] }\n'
        'other = { type = "text_files", paths = ["other.txt"] }\n'
    )
    options = ("mix.toml", "training.steps=3", "training.global_batch_size=8", "checkpoint.enable=false")
    assert train_on(2, *options, "--run-dir", "two").code == 0
    assert train(*options, "--run-dir", "one").code == 0
    for run in ("two", "one"):
        steps = [e["metrics"] for e in read_events(here / run / "events.jsonl") if e["event"] == "step"]
        assert len(steps) == 3
        for metrics in steps:
            mean = 0.75 * metrics["mix/own/loss"] + 0.25 * metrics["mix/other/loss"]
            assert mean == pytest.approx(metrics["loss"], rel=1e-5)
            assert abs(metrics["mix/own/loss"] - metrics["mix/other/loss"]) > 1e-3
    assert losses(here / "one") == pytest.approx(losses(here / "two"), rel=1e-4)


@pytest.mark.ranks
def test_ranks_that_have_different_data_do_not_begin(train_on: Callable[..., Finished], here: Path) -> None:
    shutil.copy(slow_plugin.__file__, here / "differing.py")
    ended = train_on(2, "tiny.toml", "-p", "./differing.py", "dataset.type=slow", "dataset.differs=true")
    assert ended.code == 5 and "the ranks were started with different data" in ended.err
    assert '{"of rank": 0}' in ended.err and '{"of rank": 1}' in ended.err
