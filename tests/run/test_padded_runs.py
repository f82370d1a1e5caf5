"""Whole runs: the last step of `training.epochs`, which has fewer rows than the others, is the same for every
batch size, padding and number of ranks; and so are the tokens that a run has seen, also after a resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished
from titancli.checkpoint import read_manifest
from titancli.observe.events import read_events

pytestmark = pytest.mark.ranks

ROWS, STEPS = 10, 3
RECIPE = (
    *("qwen3_moe_debug", "model.n_layers=1", "model.moe.aux_loss_coeff=0.1", "model.moe.z_loss_coeff=0.01"),
    *("loss=sft", "loop=sft", "dataset={type='chat', path='chat.jsonl', pack=false, shuffle=false}"),
    *("training.epochs=1", "training.seq_len=192", "training.global_batch_size=4", "metrics.log_freq=1"),
    *(
        "optimizer.eps=1e-4",
        "checkpoint.interval=1",
        "checkpoint.keep_latest_k=0",
        "lr_scheduler.warmup_steps=0",
    ),
)
SAME = ("loss", "grad_norm", "expert_load")
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "batches of 4": (1, ("training.local_batch_size=4",)),
    "batches of 1": (1, ("training.local_batch_size=1",)),
    "padding = none": (1, ("training.local_batch_size=2", "dataset.padding=none")),
    "2 ranks": (2, ("training.local_batch_size=2",)),
}


@pytest.fixture(autouse=True)
def chat(here: Path) -> None:
    lines = []
    for number in range(ROWS):
        answer = {"role": "assistant", "content": f"{number}" * (5 * number % 23 + 1)}
        lines.append(json.dumps({"messages": [{"role": "user", "content": "q"}, answer]}))
    (here / "chat.jsonl").write_text("".join(f"{line}\n" for line in lines))


def steps(run: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each step, as it was done last."""
    events = read_events(run / "events.jsonl")
    return {event["step"]: event["metrics"] for event in events if event["event"] == "step"}


def tokens_seen(run: Path) -> list[int]:
    states = [read_manifest(run / f"checkpoints/step-{step}").state for step in range(1, STEPS + 1)]
    return [state["engine"]["tokens_seen"] for state in states]


def test_last_step_of_epochs(train_on: Callable[..., Finished], here: Path) -> None:
    runs = []
    for number, (ranks, how) in enumerate(WAYS.values()):
        done = train_on(ranks, *RECIPE, *how, "--run-dir", f"r{number}")
        assert done.code == 0, done.err
        runs.append(here / f"r{number}")
    expected, tokens = steps(runs[0]), tokens_seen(runs[0])
    assert expected.keys() == {1, 2, 3} and expected[STEPS]["padding_share"] > 0.5
    # On the second half of the way from one rank to two.
    shutil.copytree(runs[0], here / "again")
    for step in (2, 3):
        shutil.rmtree(here / f"again/checkpoints/step-{step}")
    done = train_on(2, "again", "--resume", "training.local_batch_size=2")
    assert done.code == 0, done.err
    for run in (*runs[1:], here / "again"):
        found = steps(run)
        for step in expected:
            for name in SAME:
                assert found[step][name] == pytest.approx(expected[step][name], rel=1e-4), (
                    run.name,
                    step,
                    name,
                )
        assert tokens_seen(run) == tokens, run.name
