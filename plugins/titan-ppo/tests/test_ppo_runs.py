"""Runs of PPO: they learn, are the same on any layout, resume bit for bit, and refuse by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.cases import Layout, recipe, small, wholes
from tests.ranks import Ranks
from tests.ranks.comparison import difference
from tests.run.conftest import Finished, here, losses, train, train_on  # noqa: F401 - fixtures
from titan_ppo import Gae, Ppo
from titan_proof.digests import read_digests
from titan_testing import run_cli
from titancli import Engine, Sample, build
from titancli.observe.events import read_events

RECIPE = """
extends = "titan:grpo_digit"
loss = {type = "ppo", kl_coef = 0.02, value_clip = 0.5}
model = {dim = 64, n_layers = 1, hidden_dim = 128}
loop.advantage = {type = "gae", kl_coef = 0.01}
loop.prompts = 8
loop.samples = 64
loop.passes = 2
loop.eval_freq = 0
optimizer = {type = "adamw", lr = 6e-3, eps = 1e-4}  # rounding does not turn into steps
training = {steps = 80, local_batch_size = 16}
checkpoint.interval = 20
"""


@pytest.fixture
def ppo(here: Path) -> Path:  # noqa: F811
    (here / "ppo.toml").write_text(RECIPE)
    return here


def metrics(run: Path) -> list[dict[str, float]]:
    return [e["metrics"] for e in read_events(run / "events.jsonl") if e["event"] == "step"]


def test_a_run_learns_and_a_resumed_one_is_the_same_bit_for_bit(
    train: Callable[..., Finished],  # noqa: F811
    ppo: Path,
) -> None:
    done = train("ppo.toml", "--run-dir", "whole")
    assert done.code == 0, done.err
    first, *_, last = metrics(ppo / "whole")
    assert first["value"] == 0 and first["reward"] < 0.05
    assert last["reward"] > 0.5
    assert abs(last["value"] - last["return"]) < 0.3  # the critic has followed
    schedule = ("lr_scheduler.total_steps=80",)
    assert train("ppo.toml", "--run-dir", "parts", *schedule, "training.steps=20").code == 0
    done = train("parts", "--resume", "training.steps=80")
    assert done.code == 0, done.err
    assert losses(ppo / "parts") == losses(ppo / "whole")
    assert read_digests(ppo / "parts") == read_digests(ppo / "whole")


def test_a_critic_is_proven_although_an_export_lacks_it() -> None:
    done = run_cli("prove", "grpo_digit", "loss=ppo", "loop.advantage=gae", "--ranks", "1")
    assert done.code == 0, done.stdout
    assert "export" in done.stdout and "wrong" not in done.stdout


@pytest.mark.ranks
def test_two_ranks_make_the_run_of_one(
    train: Callable[..., Finished],  # noqa: F811
    train_on: Callable[..., Finished],  # noqa: F811
    ppo: Path,
) -> None:
    line = ("ppo.toml", "training.steps=4", "checkpoint.interval=4")
    assert train(*line, "--run-dir", "one").code == 0
    done = train_on(2, *line, "--run-dir", "two")
    assert done.code == 0, done.err
    for ours, theirs in zip(metrics(ppo / "two"), metrics(ppo / "one"), strict=True):
        for name in ("loss", "value_loss", "return", "value", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), name


def test_the_loss_and_the_advantage_belong_together(
    train: Callable[..., Finished],  # noqa: F811
    ppo: Path,
) -> None:
    done = train("grpo_digit", "loop.advantage=gae")
    assert done.code != 0 and 'the loss grpo has no values: set loss = "ppo"' in done.err
    done = train("grpo_digit", "loss=ppo")
    assert done.code != 0 and 'it learns values: set loop.advantage = "gae"' in done.err
    done = train("llama3_debug", "loss=ppo")
    assert done.code != 0 and "the loss Ppo needs advantages, old_logprobs, old_values, returns" in done.err


# --------------------------------------------------------------------------------------------- layouts


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(8):
        length = 4 + number
        tokens = torch.randint(0, 64, (length,), generator=generator).tolist()
        mask = [0.0, 0.0, *([1.0] * (length - 2))]
        log_probs = (-torch.rand(length, generator=generator)).tolist()
        made.append(Sample(tokens, mask, logprobs=log_probs, advantages=float(number % 3)))
    return made


def stepped(layout: Layout) -> dict[str, torch.Tensor]:
    """Values, advantages and two steps on samples that all ranks share."""
    with Engine.build(recipe(layout, max_norm=1e9)) as engine:
        own: Any = engine.loss
        advantage = build(Gae())
        found: dict[str, torch.Tensor] = {}
        for step in range(2):
            values = engine.forward(samples(), return_values=True)
            given = [replace(s, extra={"old_values": v}) for s, v in zip(samples(), values, strict=True)]
            rated = advantage.of_tokens(given, lambda x: x)
            made = engine.forward_backward(rated).metrics
            found |= {f"loss {name} {step}": made[name].clone() for name in ("loss", "value_loss")}
            found[f"loss values {step}"] = torch.cat(values) + 1.0  # 0 at first
            assert engine.pending is not None
            weight = engine.pending.weight
            named = wholes((n, p.grad / weight) for n, p in engine.named_parameters() if p.grad is not None)
            found |= {f"gradient {name} {step}": x for name, x in named.items()}
            engine.optim_step()
        assert own.config == Ppo()
        return found


LAYOUTS = {
    "FSDP2": (2, {"dp_shard": 2}),
    "DDP2": (2, {"dp_replicate": 2}),
    "TP2": (2, {"tp": 2}),
    "CP2": (2, {"cp": 2}),
    "PP2": (2, {"pp": 2}),
}


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = ranks(1, stepped, small(loss=Ppo()))[0]
    assert "gradient loss.value.weight 1" in found
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_makes_the_same_steps(ranks: Ranks, alone: dict[str, torch.Tensor], name: str) -> None:
    count, mesh = LAYOUTS[name]
    found = difference(ranks(count, stepped, small(mesh, loss=Ppo())), alone)
    assert found.largest < 1e-5, found
