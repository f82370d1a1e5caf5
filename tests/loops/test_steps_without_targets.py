"""Runs whose steps have no target: these are skipped, counted and told of; too many in a row end the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.run.conftest import Finished, here, train, train_on
from titancli.observe.events import read_events

__all__ = ["here", "train", "train_on"]

RECIPE = """\
extends = "titan:{base}"
name = "tiny"
[model]
type = "qwen3"
dim = 32
n_layers = 1
n_heads = 4
n_kv_heads = 2
head_dim = 8
vocab_size = 257
[model.moe]
num_experts = 4
top_k = 2
hidden_dim = 16
aux_loss_coeff = 0.1
z_loss_coeff = 0.1
"""
TOLD = "the weight of its loss is not above 0, as where no token is a target"
SILENT = """\
from titancli import component, hookimpl
from titancli.protocols.samples import Completion

@component("generator", "silent", target="{module}:Silence")
class Silent:
    \"\"\"Says nothing from the second sampling on, on one rank or on all.\"\"\"
    rank: int = -1

class Silence:
    def __init__(self, config, *, engine, tokenizer):
        self.calls, self.mine = 0, config.rank in (-1, engine.mesh.dp_rank)

    def update(self, version):
        pass

    def sample(self, prompts, seeds, limits, *, greedy=False):
        self.calls += 1
        tokens = [] if self.calls > 1 and self.mine else [65]
        one = Completion("A" * len(tokens), tokens, [-5.0] * len(tokens), "stop")
        return [[one for _ in row] for row in seeds]

@hookimpl
def titan_components():
    return [Silent]
"""


def steps(run: str) -> dict[int, dict[str, float]]:
    return {e["step"]: e["metrics"] for e in read_events(Path(run, "events.jsonl")) if e["event"] == "step"}


def files(run: str, step: int) -> bytes:
    """Weights and optimizer state, as they lie on the disk."""
    found = sorted(Path(run, "checkpoints", f"step-{step}").glob("*.safetensors"))
    assert found
    return b"".join(file.read_bytes() for file in found)


def generator(name: str, here: Path, **config: int) -> tuple[str, ...]:
    (here / f"{name}.py").write_text(SILENT.replace("{module}", name))
    more = [f"loop.generator.{key}={value}" for key, value in config.items()]
    return ("-p", f"./{name}.py", "loop.generator.type=silent", *more, "loop.eval_freq=0", "loop.prompts=4")


MASKED = """\
import torch
from titancli import Batch, component, hookimpl

@component("dataset", "masked", target="masked:Masked")
class Config:
    \"\"\"Rows of which none has a target from the second batch on.\"\"\"

class Masked:
    def __init__(self, config, *, tokenizer, seq_len, rows, dp_rank, dp_size, seed):
        self.shape, self.made = (rows, seq_len), 0

    def __iter__(self):
        while True:
            self.made += 1
            tokens = torch.arange(self.shape[0] * self.shape[1]).view(self.shape) % 250
            targets = torch.full_like(tokens, -100) if self.made > 1 else tokens + 1
            yield Batch({"tokens": tokens, "targets": targets})

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]

@hookimpl
def titan_components():
    return [Config]
"""
SHORT = (
    *("training.seq_len=64", "training.local_batch_size=2", "training.steps=6", "checkpoint.interval=1"),
    *("checkpoint.keep_latest_k=0", "metrics.log_freq=1", "lr_scheduler.warmup_steps=0"),
    *("--unset", "validation"),
)


def test_conversations_whose_answers_are_all_cut_are_refused(
    train: Callable[..., Finished], here: Path
) -> None:
    Path("tiny.toml").write_text(RECIPE.format(base="sft_debug"))
    said = [{"role": "user", "content": "why? " * 40}, {"role": "assistant", "content": "so"}]
    Path("long.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 8)
    done = train("tiny.toml", "--run-dir", "r", "dataset.path=long.jsonl", *SHORT)
    assert done.code == 5
    assert "none of its first 65 tokens is trained on" in done.err and "has no rows to train on" in done.err


def test_rows_that_are_all_masked(train: Callable[..., Finished], here: Path) -> None:
    Path("tiny.toml").write_text(RECIPE.format(base="sft_debug"))
    Path("masked.py").write_text(MASKED)
    data = ("-p", "./masked.py", "dataset={type='masked'}", "stability.max_skips=3")
    done = train("tiny.toml", "--run-dir", "r", *data, *SHORT)
    assert done.code == 1, done.err
    assert f"step 2 was skipped: {TOLD}" in done.err
    assert f"3 steps in a row were skipped, up to step 4: {TOLD}" in done.err
    found = steps("r")
    assert [one["skipped_steps"] for one in found.values()] == [0, 1, 2, 3]
    assert found[1]["grad_norm"] > 0 and found[4]["grad_norm"] == 0.0
    assert files("r", 1) == files("r", 4)


def test_completions_that_are_all_empty(train: Callable[..., Finished], here: Path) -> None:
    Path("tiny.toml").write_text(RECIPE.format(base="grpo_digit"))
    small = ("loop.samples=2", "training.steps=4", "checkpoint.interval=1", "checkpoint.keep_latest_k=0")
    done = train("tiny.toml", "--run-dir", "r", *generator("silent", here), *small)
    assert done.code == 0, done.err
    assert f"step 2 was skipped: {TOLD}" in done.err
    found = steps("r")
    assert [one["skipped_steps"] for one in found.values()] == [0, 1, 2, 3]
    assert 0 < found[1]["grad_norm"] < 1e3 and found[2]["grad_norm"] == 0
    assert files("r", 1) == files("r", 4)


def test_a_rank_whose_completions_are_all_empty(train_on: Callable[..., Finished], here: Path) -> None:
    Path("tiny.toml").write_text(RECIPE.format(base="grpo_digit"))
    small = ("loop.samples=2", "training.steps=3", "mesh.dp_shard=2")
    done = train_on(2, "tiny.toml", "--run-dir", "r", *generator("half_silent", here, rank=1), *small)
    assert done.code == 0, done.err
    assert [one["skipped_steps"] for one in steps("r").values()] == [0, 0, 0]
    assert all(0 < one["grad_norm"] < 1e3 for one in steps("r").values())
