"""Dynamic sampling replaces the same prompts by the same others on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished, here, train, train_on
from titan_rl.recorded import read
from titancli.observe.events import read_events

__all__ = ["here", "train", "train_on"]

TINY = """\
extends = "titan:grpo_digit"
[model]
dim = 32
hidden_dim = 64
vocab_size = 258
[loop]
prompts = 4
samples = 2
resample_zero_std = 2
eval_freq = 0
[loop.generator]
type = "local"
max_new_tokens = 4
[optimizer]
type = "adamw"
lr = 1e-3
eps = 1e-4
[training]
steps = 4
seq_len = 16
mixed_precision_param = "float32"
[checkpoint]
interval = 2
"""
THIRD = """\
from titancli import component, hookimpl

@component("reward", "NAME", target="NAME:build")
class Third:
    "1 if the first token is a multiple of 3, so that many pairs of completions are worth the same."
    weight: float = 1.0
    "Its weight."

def build(config):
    return lambda prompt, completion: float(completion.tokens[0] % 3 == 0)

@hookimpl
def titan_components():
    return [Third]
"""


def sampled(run: str) -> list[Any]:
    """Return what each step learned from: prompts, ids, rewards and advantages."""
    return [
        (row["step"], row["prompt"], [(s["ids"], s["reward"], s["advantage"]) for s in row["samples"]])
        for step in range(1, 5)
        for row in read(Path(run, f"rollouts/step-{step}.jsonl"))
    ]


def resampled(run: str) -> list[float]:
    events = read_events(Path(run, "events.jsonl"))
    return [event["metrics"]["resampled"] for event in events if event["event"] == "step"]


@pytest.mark.ranks
def test_ranks_share_spare_prompts(
    train: Callable[..., Finished], train_on: Callable[..., Finished], here: Path
) -> None:
    (here / "grpo.toml").write_text(TINY)
    given = []
    for name in ("one", "two", "parts"):
        (here / f"third_{name}.py").write_text(THIRD.replace("NAME", f"third_{name}"))
        given.append(("-p", f"./third_{name}.py", f'loop.rewards=[{{type="third_{name}"}}]'))
    one, two, parts = given
    assert train("grpo.toml", "--run-dir", "one", *one).code == 0
    assert train_on(2, "grpo.toml", "--run-dir", "two", *two).code == 0
    schedule = "lr_scheduler.total_steps=4"
    assert train("grpo.toml", "--run-dir", "parts", *parts, schedule, "training.steps=2").code == 0
    done = train_on(2, "parts", "--resume", *parts[:2], "training.steps=4")
    assert done.code == 0, done.err
    found = {run: sampled(run) for run in ("one", "two", "parts")}
    assert found["one"] == found["two"] == found["parts"]
    counts = resampled("one")
    assert counts == resampled("two") == resampled("parts") and sum(counts) >= 4, counts
