"""Steps of which no sample is left: skipped, counted and named, up to the limit of skipped steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.conftest import Finished, here, train, train_on
from titan_rl.failures import FLAT
from titancli import Engine, Sample
from titancli.observe.events import read_events

__all__ = ["here", "train", "train_on"]

TINY = """\
extends = "titan:grpo_digit"
[model]
dim = 32
hidden_dim = 64
[loop]
prompts = 4
samples = 3
eval_freq = 0
[loop.generator]
type = "local"
max_new_tokens = 4
[training]
steps = 3
seq_len = 16
[checkpoint]
interval = 1
"""
PICKY = """\
from titancli import component, hookimpl

@component("reward", "NAME", target="NAME:build")
class Picky:
    "Raises where the prompt's digit is not among some."
    weight: float = 1.0
    "Its weight."
    only: str = ""
    "Digits of prompts that it rates."

def build(config):
    def reward(prompt, completion):
        if prompt.text not in config.only or not config.only:
            raise ValueError("no judge")
        return float(len(completion.text) % 3)
    return reward

@hookimpl
def titan_components():
    return [Picky]
"""
ONE_KIND = """\
from titancli import component, hookimpl
from titancli.protocols.samples import Completion

@component("generator", "NAME", target="NAME:build")
class OneKind:
    "Says the same each time, and never ends."
    length: int = 2
    "Tokens of a completion."

class Generator:
    def __init__(self, length):
        self._length = length
    def update(self, version):
        pass
    def sample(self, prompts, seeds, limits, *, greedy=False):
        made = Completion("A" * self._length, [65] * self._length, [-5.0] * self._length, "length")
        return [[made for _ in row] for row in seeds]

def build(config, *, engine, tokenizer):
    return Generator(config.length)

@hookimpl
def titan_components():
    return [OneKind]
"""
PPO = ('loss={type="ppo", kl_coef=0.1}', 'loop.advantage={type="gae", kl_coef=0.1}')
MASKED = "12 ran out of room (loop.mask_truncated = true)"
FAILED = '12 have a failed reward (loop.failed_reward = "drop")'
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "grpo": ((), MASKED),
    "reference": (("loss.kl_coef=0.1", 'loss.importance="token_mask"'), FAILED),
    "ppo": (PPO, MASKED),
    "ppo_failed": (PPO, FAILED),
}


@pytest.fixture
def tiny(here: Path) -> Path:
    (here / "grpo.toml").write_text(TINY)
    return here


def picky(folder: Path, name: str, only: str) -> tuple[str, ...]:
    """Return arguments for a reward of a plugin, with failed samples dropped."""
    (folder / f"{name}.py").write_text(PICKY.replace("NAME", name))
    rewards = f'loop.rewards=[{{type="{name}", only="{only}"}}]'
    return ("-p", f"./{name}.py", rewards, 'loop.failed_reward="drop"')


def steps(run: str) -> dict[int, dict[str, Any]]:
    return {e["step"]: e["metrics"] for e in read_events(Path(run, "events.jsonl")) if e["event"] == "step"}


def weights(run: str, step: int) -> bytes:
    files = sorted(Path(run, f"checkpoints/step-{step}").glob("*.safetensors"))
    return b"".join(file.read_bytes() for file in files)


def endless(folder: Path, name: str, length: int = 2) -> tuple[str, ...]:
    """Return arguments for a generator of a plugin, all of whose completions run out of room."""
    (folder / f"{name}.py").write_text(ONE_KIND.replace("NAME", name))
    return ("-p", f"./{name}.py", f'loop.generator={{type="{name}", length={length}}}')


@pytest.mark.parametrize("case", CASES)
def test_steps_without_samples_are_skipped(train: Callable[..., Finished], tiny: Path, case: str) -> None:
    """Nothing is learned, the steps count, rollouts are there, and a resume goes on."""
    loss, words = CASES[case]
    masked = words is MASKED
    more = (*endless(tiny, f"endless_{case}"), "loop.mask_truncated=true")
    given = more if masked else picky(tiny, f"picky_{case}", "")
    done = train("grpo.toml", "--run-dir", "r", *loss, *given)
    # A reward that has never worked is an error at the end.
    assert done.code == (0 if masked else 1) and ("failed each time" in done.err) == (not masked), done.err
    for step in (1, 2, 3):
        assert f"step {step} has no sample to learn from: of its completions {words}" in done.err
        assert len(Path("r", f"rollouts/step-{step}.jsonl").read_text().splitlines()) == 4
    found = steps("r")
    assert [found[step]["skipped_steps"] for step in (1, 2, 3)] == [1, 2, 3]
    assert weights("r", 2) == weights("r", 3) != b""
    if masked:
        local = 'loop.generator={type="local", max_new_tokens=4}'
        done = train("r", "--resume", *given[:2], local, "loop.mask_truncated=false", "training.steps=4")
        assert done.code == 0, done.err
        assert steps("r")[4]["skipped_steps"] == 3 and weights("r", 4) != weights("r", 3)


def test_too_many_end_the_run_saved(train: Callable[..., Finished], tiny: Path) -> None:
    """Two steps a sampling: the limit is that of skipped steps, and the reason is the samples'."""
    more = ("loop.mask_truncated=true", "loop.updates=2", "stability.max_skips=3", "checkpoint.interval=2")
    done = train("grpo.toml", "--run-dir", "r", *endless(tiny, "endless"), *more, "training.steps=8")
    assert done.code == 1 and "Traceback" not in done.err
    assert "no sample was left to learn from in 2 samplings in a row, up to step 3" in done.err
    assert f"of the last completions {MASKED}" in done.err and "--resume" in done.err
    assert Path("r/checkpoints/step-4/manifest.json").is_file()
    again = ("-p", "./endless.py", "loop.mask_truncated=false", "training.steps=6")
    assert train("r", "--resume", *again).code == 0


def test_one_rank_without_samples(
    train: Callable[..., Finished], train_on: Callable[..., Finished], tiny: Path
) -> None:
    """Rewards fail for most prompts, so that some steps have samples on one rank only, and some on none."""
    more = ("training.steps=6", "model.vocab_size=258", "training.local_batch_size=1")
    more += ('optimizer={type="adamw", lr=1e-3, eps=1e-4}', "training.mixed_precision_param=float32")
    for name, run in (("one", train), ("two", lambda *given: train_on(2, *given))):
        done = run("grpo.toml", "--run-dir", name, *picky(tiny, f"few_{name}", "03"), *more)
        assert done.code == 0, done.err
    one, two = steps("one"), steps("two")
    assert [one[step]["skipped_steps"] for step in one] == [two[step]["skipped_steps"] for step in one]
    assert 0 < one[6]["skipped_steps"] < 6
    halves = []
    for step in one:
        rows = [
            json.loads(line) for line in Path("one", f"rollouts/step-{step}.jsonl").read_text().splitlines()
        ]
        counted = [any(sample["counted"] for sample in row["samples"]) for row in rows]
        halves.append((any(counted[:2]), any(counted[2:])))
    assert (True, False) in halves or (False, True) in halves, halves
    for step in one:
        for name in ("loss", "reward", "grad_norm", "response_length"):
            assert two[step][name] == pytest.approx(one[step][name], rel=1e-4, abs=1e-6, nan_ok=True), (
                step,
                name,
            )


def test_completions_without_a_token(train: Callable[..., Finished], tiny: Path) -> None:
    done = train("grpo.toml", "--run-dir", "r", *endless(tiny, "silent", 0))
    assert done.code == 0, done.err
    assert "step 3 has no sample to learn from: of its completions 12 have no token" in done.err
    assert steps("r")[3]["skipped_steps"] == 3


def test_equal_rewards_are_named_once(train: Callable[..., Finished], tiny: Path) -> None:
    """All completions are worth the same for many steps; a run that learns gets no such line."""
    rewards = 'loop.rewards=[{type="length", free=99, limit=100}]'
    done = train("grpo.toml", "--run-dir", "r", rewards, f"training.steps={2 * FLAT + 2}")
    assert done.code == 0, done.err
    assert done.err.count(f"were equal in {FLAT} samplings in a row, up to step {FLAT}") == 1
    assert done.err.count("samplings in a row") == 1


def test_nothing_on_all_ranks_is_a_call(tmp_path: Path) -> None:
    """A script may pass no samples: the step has no weight, whatever the loss reads."""
    more = ["model.dim=32", "model.hidden_dim=64", 'loss={type="grpo", kl_coef=0.1, importance="token_mask"}']
    with Engine.build("grpo_digit", more) as engine:
        before = {name: tensor.clone() for name, tensor in engine.weights() if tensor is not None}
        found = engine.forward_backward([], shared=False)
        assert found.logprobs == [] and engine.forward([], shared=False) == []
        assert int(engine.optim_step()["skipped_steps"]) == 1 and engine.step == 1
        after = dict(engine.weights())
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        sample = Sample([1, 2, 3], mask=[0, 1, 1], logprobs=[0.0, -1.0, -1.0], advantages=1.0)
        with pytest.raises(Exception, match="needs reference, which sample 0 has not"):
            engine.forward_backward([sample], shared=False)
