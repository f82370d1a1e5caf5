"""`loop.moe_replay`: GRPO whose trainer visits the experts that the sampler visited."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_grpo import TINY, learnt, rollouts, steps

from tests.engine.flips import flipped
from tests.run.conftest import Finished, here, train, train_on
from titan_rl.recorded import packed_routes, unpacked_routes
from titancli.cli import main
from titancli.errors import EnvironmentProblem
from titancli.rl.generator import LocalGenerator

__all__ = ["here", "train", "train_on"]

MODEL = """\
[model]
type = "qwen3"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim = 8
vocab_size = 257
[model.moe]
num_experts = 8
top_k = 2
hidden_dim = 16
load_balance_coeff = 1e-2
"""
EXPERTS = TINY.replace("[model]\ndim = 32\nhidden_dim = 64\n", MODEL).replace(
    "[loop]\n", '[loop]\nmoe_replay = "rollout"\n'
)
SHORT = ("training.steps=2", "loop.eval_freq=0", "checkpoint.interval=2")


@pytest.fixture
def tiny(here: Path) -> Path:
    sys.modules.pop("other", None)  # each folder has a copy of its own
    (here / "grpo.toml").write_text(EXPERTS)
    (here / "dense.toml").write_text(TINY)
    return here


def test_a_resume_with_replay_is_bitwise_the_same(train: Callable[..., Finished], tiny: Path) -> None:
    """With what else computes with the routes: two updates, log-probabilities of old weights, a reference."""
    more = ("loop.updates=2", "loss.importance=token_truncate", "loss.kl_coef=0.1", "optimizer.lr=1e-2")
    assert train("grpo.toml", "--run-dir", "whole", *more).code == 0
    assert train("grpo.toml", "--run-dir", "cut", *more, "training.steps=2", "loop.eval_freq=0").code == 0
    assert train("cut", "--resume", "training.steps=6", "loop.eval_freq=4").code == 0
    assert learnt("whole", 6) == learnt("cut", 6)
    assert train("grpo.toml", "--run-dir", "none", *more, "loop.moe_replay=none").code == 0
    assert learnt("none", 6) != learnt("whole", 6), "biases have moved between the two updates"
    for row in rollouts("whole", 5):
        for sample in row["samples"]:
            routes = unpacked_routes(sample["routes"])
            assert routes.shape == (len(row["prompt_ids"]) + len(sample["ids"]) - 1, 2, 2)
            assert routes.dtype == np.uint8 and routes.max() < 8
    assert "routes" not in rollouts("none", 5)[0]["samples"][0]


def test_a_sampler_that_routes_otherwise_is_followed_by_the_trainer(
    train: Callable[..., Finished], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = LocalGenerator.sample

    def perturbed(self: LocalGenerator, *args: Any, **how: Any) -> Any:
        with flipped(0.1, []):
            return sample(self, *args, **how)

    monkeypatch.setattr(LocalGenerator, "sample", perturbed)
    for replay in ("rollout", "none"):
        assert train("grpo.toml", "--run-dir", replay, *SHORT, f"loop.moe_replay={replay}").code == 0
    followed, not_followed = steps("rollout")[1], steps("none")[1]
    assert abs(followed["sampler_k1"]) < 1e-6 and followed["sampler_k3"] < 1e-10
    assert not_followed["sampler_k3"] > 100 * followed["sampler_k3"]


@pytest.mark.ranks
def test_experts_on_two_ranks_learn_with_replay(train_on: Callable[..., Finished], tiny: Path) -> None:
    done = train_on(2, "grpo.toml", "--run-dir", "r", *SHORT, "mesh.dp_shard=2", "mesh.ep=2")
    assert done.code == 0
    assert abs(steps("r")[1]["sampler_k1"]) < 1e-6
    assert all("routes" in sample for row in rollouts("r", 1) for sample in row["samples"])


# --------------------------------------------------------------------------------------- what is refused

OTHER = """\
import numpy as np
from titancli import component, hookimpl
from titancli.protocols.samples import Completion

@component("generator", "other", target="other:build")
class Other:
    "Answers by nothing, or by an 8."
    records: bool = True
    routes: int | None = None
    answers: bool = True

class Generator:
    def __init__(self, config):
        self.config = config
        if config.records:
            self.record_routes = lambda: None
    def update(self, version):
        pass
    def sample(self, prompts, seeds, limits, *, greedy=False):
        tokens = [56] if self.config.answers else []
        def routes(prompt):
            if self.config.routes is None:
                return None
            length = len(prompt) + len(tokens) - 1 + self.config.routes
            return np.tile(np.array([3, 1], dtype=np.uint8), (length, 2, 1))
        text, log_probs = "8" * len(tokens), [-1.0] * len(tokens)
        return [
            [Completion(text, tokens, log_probs, "length", None, routes(p)) for _ in row]
            for p, row in zip(prompts, seeds)
        ]

def build(config, *, engine, tokenizer):
    return Generator(config)

@hookimpl
def titan_components():
    return [Other]
"""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("records=false", "the generator Generator cannot record which experts tokens visit"),
        (
            "records=true",
            "the generator Generator returned no routes for a prompt and a completion of 5 tokens",
        ),
        (
            "records=true, routes=-1",
            "the generator Generator returned routes of 3 for a prompt and a completion",
        ),
    ],
)
def test_a_generator_without_routes_is_refused_by_name(
    train: Callable[..., Finished], tiny: Path, fields: str, words: str
) -> None:
    (tiny / "other.py").write_text(OTHER)
    how = ("-p", "./other.py", f"loop.generator={{type='other', {fields}}}")
    done = train("grpo.toml", "--run-dir", "r", *SHORT, *how)
    assert done.code == 1 and words in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("answers", ["true", "false"])
def test_another_generators_routes_are_replayed_and_completions_may_be_empty(
    train: Callable[..., Finished], tiny: Path, answers: str
) -> None:
    (tiny / "other.py").write_text(OTHER)
    how = ("-p", "./other.py", f"loop.generator={{type='other', routes=0, answers={answers}}}")
    assert train("grpo.toml", "--run-dir", "r", *SHORT, *how).code == 0
    assert list(steps("r")) == [1, 2]


@pytest.mark.parametrize(
    ("recipe", "override", "words"),
    [
        ("dense.toml", "loop.moe_replay=rollout", "the model llama3 has no mixture of experts here"),
        ("grpo.toml", "debug.moe_force_load_balance=true", "leaves routers no choice to replay"),
        ("grpo.toml", "loop.moe_replay=train", "loop.moe_replay"),
    ],
)
def test_what_cannot_be_replayed_is_said_before_a_run(
    tiny: Path, capsys: pytest.CaptureFixture[str], recipe: str, override: str, words: str
) -> None:
    assert main(["validate", recipe, override]) == 3
    assert words in "".join(capsys.readouterr())


def test_routes_on_a_disk_are_read_as_they_were_and_nothing_else_is() -> None:
    routes = np.arange(-1, 2999).reshape(250, 4, 3).astype(np.int16)
    entry = json.loads(json.dumps(packed_routes(routes)))
    found = unpacked_routes(entry)
    assert np.array_equal(found, routes) and found.dtype == np.int16 and found.flags.writeable
    for wrong in (
        {},
        {"dtype": "object"},
        {"dtype": ["uint8"]},
        {"shape": [250, 4]},
        {"shape": "x"},
        {"data": "%%"},
        {"data": None},
    ):
        with pytest.raises(EnvironmentProblem, match="a sample's routes cannot be read"):
            unpacked_routes({**entry, **wrong} if wrong else {})
