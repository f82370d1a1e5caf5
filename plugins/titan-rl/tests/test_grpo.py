"""GRPO as whole runs: what it learns, what is reported of it, and that a resume changes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from tests.run.conftest import Finished, here, train, train_on
from titan_proof.digests import read_digests
from titan_rl import Digit, ExactMatch, GrpoLoop
from titan_rl.failures import Failures
from titan_rl.scoring import Scorer
from titan_rl.steps import check_fits
from titan_testing import run_cli
from titancli import Engine, Sample, SamplingParams, load_recipe
from titancli.cli import main
from titancli.engine.rng import derive
from titancli.errors import RecipeError
from titancli.observe.events import read_events
from titancli.registry.component import build
from titancli.rl.prompts import PromptSource

__all__ = ["here", "train", "train_on"]

TINY = """\
extends = "titan:grpo_digit"
name = "tiny"
[model]
dim = 32
hidden_dim = 64
[loop]
prompts = 4
samples = 6
eval_freq = 4
eval_prompts = 10
[loop.task]
type = "sum"
[loop.generator]
type = "local"
max_new_tokens = 7
top_p = 0.99
[training]
steps = 6
[checkpoint]
interval = 2
"""
ALWAYS = """
reward reward_std solved zero_std_groups response_length truncated entropy ratio clip_fraction sampler_k1
sampler_k3 reference_kl grad_norm sample_seconds train_seconds reward_seconds version_lag reward_failed
"""


@pytest.fixture
def tiny(here: Path) -> Path:
    (here / "grpo.toml").write_text(TINY)
    return here


def steps(run: str) -> dict[int, dict[str, float]]:
    return {e["step"]: e["metrics"] for e in read_events(Path(run, "events.jsonl")) if e["event"] == "step"}


def learnt(run: str, step: int) -> tuple[str, dict[str, str]]:
    """Return what a step leaves on the disk, except times: weights, optimizer, and what was sampled."""
    files = sorted(Path(run, "checkpoints", f"step-{step}").glob("*.safetensors"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return digest, {file.name: file.read_text() for file in Path(run, "rollouts").iterdir()}


def test_a_resume_is_bitwise_what_was_sampled_included(train: Callable[..., Finished], tiny: Path) -> None:
    """With two updates on what was sampled, and a reference."""
    more = ("loop.updates=2", "optimizer.lr=1e-2")
    (tiny / "held-out.txt").write_text("2+3=5\n" * 40)
    held_out = ('validation.datasets.x={type="text_files", paths=["held-out.txt"]}', "validation.freq=4")
    assert train("grpo.toml", "--run-dir", "whole", *more, *held_out).code == 0
    events = [e for e in read_events(Path("whole", "events.jsonl")) if e["event"] == "validation"]
    assert [e["step"] for e in events] == [0, 4, 6]  # by cross-entropy: these rows have no advantages
    assert list(events[0]["metrics"]) == ["validation/x/loss", "validation/x/perplexity"]
    assert train("grpo.toml", "--run-dir", "cut", *more, "training.steps=2", "loop.eval_freq=0").code == 0
    assert train("cut", "--resume", "training.steps=6", "loop.eval_freq=4").code == 0
    assert learnt("whole", 6) == learnt("cut", 6)
    digests = read_digests(Path("whole"))
    assert read_digests(Path("cut")) == digests and list(digests) == [1, 2, 3, 4, 5, 6]
    assert sorted(learnt("whole", 6)[1]) == ["step-1.jsonl", "step-3.jsonl", "step-5.jsonl"]
    whole, cut = steps("whole"), steps("cut")
    names = [
        name
        for name in whole[6]
        if not name.startswith("time/") and not name.endswith(("seconds", "second", "_gib"))
    ]
    assert [whole[6][name] for name in names] == [cut[6][name] for name in names]
    assert set(ALWAYS.split()) <= set(whole[6])
    assert [whole[n]["version_lag"] for n in (1, 2, 3, 4)] == [0, 1, 0, 1]
    for step in (1, 3, 5):  # nothing was learnt since it was sampled
        assert abs(whole[step]["sampler_k1"]) < 1e-6 and 0 <= whole[step]["sampler_k3"] < 1e-6
        assert whole[step]["ratio"] == pytest.approx(1.0, abs=1e-6) and whole[step]["clip_fraction"] == 0
    assert whole[4]["sampler_k3"] > 1e-4 and whole[6]["reference_kl"] > 1e-4
    assert "eval_solved" in whole[4] and "eval_solved" in whole[6] and "eval_solved" not in whole[5]


def test_passes_over_the_same_completions_and_a_resume_between_samplings(
    train: Callable[..., Finished], tiny: Path
) -> None:
    """Four steps on each sampling, corrected for the sampler, of prompts that teach something."""
    reward = "loop.rewards=[{type='regex', pattern='[0-7]'}]"
    fields = (reward, "loop.updates=2", "loop.passes=2", "loop.resample_zero_std=2")
    loss = ("loss.importance=token_truncate", "loss.entropy_coef=0.01", "optimizer.lr=1e-2")
    more = (*fields, *loss, "loop.eval_freq=0", "checkpoint.interval=4", "lr_scheduler.total_steps=8")
    assert train("grpo.toml", "--run-dir", "whole", *more, "training.steps=8").code == 0
    assert train("grpo.toml", "--run-dir", "cut", *more, "training.steps=4").code == 0
    assert train("cut", "--resume", "training.steps=8").code == 0
    assert learnt("whole", 8) == learnt("cut", 8)
    whole = steps("whole")
    assert [whole[n]["version_lag"] for n in range(1, 9)] == [0, 1, 2, 3] * 2
    assert [whole[n]["ratio"] == pytest.approx(1.0, abs=1e-6) for n in range(1, 5)] == [True, *[False] * 3]
    for step in whole.values():  # the sampler is the model itself
        assert step["importance"] == pytest.approx(1.0, abs=1e-5) and step["importance_bounded"] == 0
        assert {"resampled", "entropy"} <= step.keys()
    assert sum(step["resampled"] for step in whole.values()) > 0
    (row, *_) = rollouts("whole", 5)
    assert row["version"] == 4 and row["prompt_ids"] == list(row["prompt"].encode())
    assert all(len(one["ids"]) == len(one["logprobs"]) == one["tokens"] for one in row["samples"])


@pytest.mark.parametrize("loss", ["2.0", None])
def test_a_temperature_is_that_of_the_policy(
    train: Callable[..., Finished], tiny: Path, loss: str | None
) -> None:
    """Nothing was learned yet, so the trainer's log-probabilities are the sampler's; with another divisor in
    the loss they are not."""
    more = ("loop.generator.temperature=2.0", "training.steps=1", "loop.eval_freq=0", "loss.kl_coef=0.1")
    for run, own in (("same", loss), ("other", "1.0")):
        fields = more if own is None else (*more, f"loss.temperature={own}")
        assert train("grpo.toml", "--run-dir", run, *fields).code == 0
    same, other = steps("same")[1], steps("other")[1]
    assert abs(same["sampler_k1"]) < 1e-6 and same["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert abs(same["reference_kl"]) < 1e-9 and same["entropy"] > other["entropy"]
    assert other["sampler_k3"] > 10 * abs(same["sampler_k3"])


MUTE = """\
from titancli import component, hookimpl
from titancli.protocols.samples import Completion

@component("generator", "mute", target="mute:build")
class Mute:
    "Ends every completion at once."

class Generator:
    def update(self, version):
        pass
    def sample(self, prompts, seeds, limits, *, greedy=False):
        return [[Completion("", [], [], "length") for _ in row] for row in seeds]

def build(config, *, engine, tokenizer):
    return Generator()

@hookimpl
def titan_components():
    return [Mute]
"""


def test_completions_that_are_always_empty_end_the_run(train: Callable[..., Finished], tiny: Path) -> None:
    (tiny / "mute.py").write_text(MUTE)
    done = train(
        *("grpo.toml", "--run-dir", "r", "-p", "./mute.py", "loop.generator={type='mute'}"),
        *("loop.max_failed=2", "loop.eval_freq=0"),
    )
    assert done.code == 1
    assert done.err.count("every completion is empty, so there is nothing to learn from") == 2
    assert "every completion was empty in 2 samplings in a row, up to step 2" in done.err
    assert Path("r", "checkpoints", "step-2", "manifest.json").is_file()


def test_a_script_over_the_engines_verbs_is_the_recipe_bit_for_bit(
    train: Callable[..., Finished], tiny: Path
) -> None:
    """With a reference: a snapshot in the script, a model that is built again in the run."""
    more = ["training.steps=3", "loop.eval_freq=0", "loss.kl_coef=0.1", "optimizer.lr=1e-2"]
    assert train("grpo.toml", "--run-dir", "run", *more).code == 0
    known = load_recipe("grpo.toml", more).recipe
    loop, training = known.loop, known.training
    reward, advantage = build(loop.rewards[0]), build(loop.advantage)
    params = SamplingParams(max_tokens=7, top_p=0.99)
    with Engine.build("grpo.toml", more) as engine, engine.snapshot() as reference:
        task = build(loop.task, seed=training.seed)
        prompts = PromptSource(task, engine.tokenizer, longest=training.seq_len)
        for step in range(3):
            asked = prompts.take(loop.prompts)
            seeds = [
                [derive(training.seed, "sample", step, prompt, one) for one in range(loop.samples)]
                for prompt in range(loop.prompts)
            ]
            drawn = engine.sample([one.tokens for one in asked], params=params, seeds=seeds)
            rewards = torch.tensor(
                [[reward(one.prompt, made) for made in row] for one, row in zip(asked, drawn, strict=True)],
                dtype=torch.float64,
            )
            found = advantage(rewards, torch.ones_like(rewards, dtype=torch.bool)).tolist()
            samples = [
                Sample.of(one.tokens, made, number)
                for one, row, numbers in zip(asked, drawn, found, strict=True)
                for made, number in zip(row, numbers, strict=True)
            ]
            budget = training.local_batch_size * training.seq_len
            own = reference.forward(samples, budget=budget)
            samples = [replace(one, reference=x) for one, x in zip(samples, own, strict=True)]
            result = engine.forward_backward(samples, budget=budget)
            metrics = result.metrics | engine.optim_step()
            of_run = steps("run")[step + 1]
            for name in ("loss", "grad_norm", "entropy", "reference_kl", "sampler_k3", "tokens"):
                assert name not in of_run or float(metrics[name]) == of_run[name], (step, name)
        engine.save("script/step-3")
    assert learnt("run", 3)[0] == hashlib.sha256(tensors("script/step-3")).hexdigest()


def tensors(folder: str) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(Path(folder).glob("*.safetensors")))


def rollouts(run: str, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "rollouts", f"step-{step}.jsonl").read_text().splitlines()]


def without_log_probs(run: str, step: int) -> tuple[list[dict[str, Any]], list[float]]:
    rows = rollouts(run, step)
    return rows, [x for row in rows for sample in row["samples"] for x in sample.pop("logprobs")]


@pytest.mark.parametrize("mesh", [[], ["mesh.dp_shard=1", "mesh.tp=2"]], ids=["FSDP2", "TP"])
def test_two_ranks_learn_the_same_as_one(
    train: Callable[..., Finished], train_on: Callable[..., Finished], tiny: Path, mesh: list[str]
) -> None:
    """Prompts dealt out, FSDP2, unevenly many rows; one prompt a rank and update; or half of a model each."""
    more = ("training.steps=2", "loop.eval_freq=2", "training.local_batch_size=1", "training.seq_len=16")
    more += ("model.vocab_size=258",)  # which two ranks can share
    assert train("grpo.toml", "--run-dir", "one", *more).code == 0
    assert train_on(2, "grpo.toml", "--run-dir", "two", *more, *mesh).code == 0
    for step in (1, 2):
        (one, ones), (two, twos) = without_log_probs("one", step), without_log_probs("two", step)
        assert one == two and ones == pytest.approx(twos, rel=1e-4)
        for name in ("loss", "reward", "grad_norm", "entropy", "response_length", "reference_kl"):
            expected = steps("one")[step][name]
            assert steps("two")[step][name] == pytest.approx(expected, rel=1e-4, abs=1e-7), (step, name)
    assert steps("one")[2]["eval_reward"] == steps("two")[2]["eval_reward"]


FAULTY = """\
import time
from titancli import component, hookimpl

@component("reward", "bad", target="bad:build")
class Bad:
    "Raises, hangs and returns NaN in turn."
    weight: float = 10.0
    "Its weight."

def build(config):
    asked = []
    def reward(prompt, completion):
        asked.append(completion)
        number = len(asked) % 6
        if number == 1:
            raise ValueError("no such answer")
        if number == 2 and len(asked) < 9:
            time.sleep(60)
        return float("nan") if number == 3 else 0.1
    return reward

@hookimpl
def titan_components():
    return [Bad]
"""


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_a_reward_that_fails_ends_no_run(train: Callable[..., Finished], tiny: Path, policy: str) -> None:
    (tiny / f"bad_{policy}.py").write_text(FAULTY.replace("bad:build", f"bad_{policy}:build"))
    rewards = 'loop.rewards=[{type = "exact_match"}, {type = "bad"}]'
    more = ("training.steps=2", "loop.reward_timeout=0.1", f"loop.failed_reward={policy}")
    done = train("grpo.toml", "--run-dir", "r", "-p", f"./bad_{policy}.py", rewards, *more)
    assert done.code == 0
    assert "the reward bad failed: ValueError: no such answer" in done.err and "10 rewards failed" in done.err
    assert steps("r")[1]["reward_failed"] == 10
    samples = [sample for row in rollouts("r", 1) for sample in row["samples"]]
    told = [sample["failed"].get("bad", "") for sample in samples[:4]]
    words = ["ValueError: no such answer", "took longer than 0.1 s", "it returned nan", ""]
    assert [found.partition(" (")[0] for found in told] == words
    assert sum(not sample["counted"] for sample in samples) == (10 if policy == "drop" else 0)
    assert all(sample["advantage"] == 0 for sample in samples if not sample["counted"])
    assert {sample["reward"] for sample in samples if not sample["failed"]} <= {1.0, 2.0}
    evaluated = steps("r")[2]  # every good completion is solved
    assert evaluated["eval_reward_failed"] == 4
    assert evaluated["eval_solved"] == 1.0 if policy == "drop" else 0.6 <= evaluated["eval_solved"] < 1.0
    done = run_cli("rollouts", "r", "--step", "1", "--prompts", "1", "--color", "always")
    assert done.code == 0
    assert "bad: ValueError: no such answer" in done.stdout and "bad: it returned nan" in done.stdout
    assert ("not counted" in done.stdout) == (policy == "drop")
    colored = "\x1b[31m" in done.stdout and "\x1b[32m" in done.stdout
    assert colored == (policy == "zero")  # else all that count are worth the same
    done = run_cli("rollouts", "r", "--step", "9")
    assert done.code == 2 and "the nearest is 2" in done.stderr


def failures_of_the_last_rank() -> tuple[dict[str, str], str]:
    """Return what a rank knows after two steps in which a reward failed on the last rank alone."""
    world = dist.get_world_size()
    mesh = SimpleNamespace(degrees=SimpleNamespace(dp=world), dp_group=dist.group.WORLD)
    scorer = Scorer([ExactMatch()], 1.0)
    failures = Failures(scorer, 10, SimpleNamespace(mesh=mesh))  # type: ignore[arg-type]
    if dist.get_rank() == world - 1:
        scorer.warn("exact_match", "no answer")
    for step in (1, 2):
        rollouts = SimpleNamespace(
            worked={"exact_match": 0}, failing={"exact_match"}, all_empty=False, left_out={}, flat=False
        )
        failures.count(rollouts, step)  # type: ignore[arg-type]
    return scorer.first_failures, str(failures.verdict("finished"))


@pytest.mark.ranks
def test_how_a_reward_failed_on_another_rank_is_known_on_every_rank(ranks: Ranks) -> None:
    """Rank 0 alone writes the output and the event log."""
    for first, verdict in ranks(2, failures_of_the_last_rank):
        assert first == {"exact_match": "no answer"}
        assert "the reward exact_match failed each time\n  exact_match: no answer" in verdict


ALWAYS_BAD = FAULTY.replace("number = len(asked) % 6", "number = 1").replace("Raises, hangs", "Fails")


@pytest.mark.parametrize(
    ("rewards", "more", "words", "steps_done"),
    [
        (["bad"], [], "the reward alone failed each time\n  alone: ValueError: no such answer", 2),
        (["bad", "exact_match"], [], "the reward both failed each time\n  both: ValueError", 2),
        (
            ["bad"],
            ["loop.max_failed=1"],
            "every reward failed in 1 samplings in a row, up to step 1\n",
            1,
        ),
    ],
    ids=["alone", "both", "most"],
)
def test_rewards_that_always_fail_end_the_run_with_an_error(
    train: Callable[..., Finished],
    tiny: Path,
    rewards: list[str],
    more: list[str],
    words: str,
    steps_done: int,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.callspec.id
    plugin = ALWAYS_BAD.replace('"bad"', f'"{name}"').replace("bad:build", f"always_{name}:build")
    (tiny / f"always_{name}.py").write_text(plugin)
    listed = ", ".join(f'{{type = "{name if reward == "bad" else reward}"}}' for reward in rewards)
    done = train(
        *("grpo.toml", "--run-dir", "r", "-p", f"./always_{name}.py", f"loop.rewards=[{listed}]"),
        *("training.steps=2", "loop.eval_freq=0", *more),
    )
    assert done.code == 1
    assert words in done.err and "Traceback" not in done.err
    told = "every reward failed, so no sample has an advantage"
    assert done.err.count(told) == (0 if "exact_match" in rewards else steps_done)
    assert Path("r", "checkpoints", f"step-{steps_done}", "manifest.json").is_file()


def test_grpo_digit_learns_from_nothing(train: Callable[..., Finished], here: Path) -> None:
    """One seed of the recipe, from 1 in 257, as far as nine digits of ten. The last one comes sooner or later
    by how a CPU rounds, so that all of them are asked for in the slow set."""
    assert (
        train(
            "grpo_digit",
            "--run-dir",
            "r",
            "training.seed=2",
            "training.steps=40",
            "lr_scheduler.total_steps=100",
        ).code
        == 0
    )
    solved = [step["eval_solved"] for step in steps("r").values() if "eval_solved" in step]
    assert len(solved) == 4 and max(solved[-2:]) >= 0.88, solved


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_digit_learns_nearly_every_digit_from_any_seed(
    train: Callable[..., Finished], here: Path, seed: int
) -> None:
    assert train("grpo_digit", "--run-dir", "r", f"training.seed={seed}").code == 0
    assert steps("r")[100]["eval_solved"] >= 0.9  # a seed may leave out one digit of ten


@pytest.mark.slow
def test_grpo_goes_on_from_what_was_fine_tuned(train: Callable[..., Finished], here: Path) -> None:
    assert train("sft_sum", "--run-dir", "sft").code == 0
    assert train("sft_then_grpo_sum", "--run-dir", "r", "weights=sft/checkpoints/step-160").code == 0
    metrics = steps("r")
    before, after = (
        sum(metrics[n]["reward"] for n in numbers) / 5 for numbers in (range(1, 6), range(96, 101))
    )
    assert metrics[100]["eval_solved"] >= 0.75 and after > before + 0.15


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loss=cross_entropy", 'the loss cross_entropy cannot be trained on samples: set loss = "grpo"'),
        ("dataset=python_stdlib", "the loop grpo gets its prompts from loop.task and uses no dataset"),
        ("training.global_batch_size=64", "remove training.global_batch_size"),
        ("loop.generator.max_new_tokens=64", "it leaves no room for a prompt"),
        ("loop.updates=4", "training.steps = 6 is not a multiple of it"),
        ("mesh.pp=2", "it samples from a whole model, but mesh.pp = 2 cuts it into stages"),
        ("loss.length_norm=constant", 'if length_norm = "constant", and only then'),
        ('loop.rewards=[{type = "regex", pattern = "("}]', "is not a valid regular expression"),
        ("loop.rewards=[]", "loop.rewards"),
        ("loop.prompts=5 loop.updates=2", "loop.prompts = 5 is not a multiple of it"),
        ("loop.passes=4", "training.steps = 6 is not a multiple of it"),
        ("loop.updates=2 loop.passes=2", "training.steps = 6 is not a multiple of updates x passes = 4"),
        ("loss.delta=1.1", "must be greater than 1 + clip_high = 1.2"),
        (
            "loop.reward_timeout=40.0",
            "exceeds the time that the other ranks wait (comm.train_timeout_seconds = 100)",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_a_run(
    tiny: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    overrides = [override] if "[" in override else override.split()
    assert main(["validate", "grpo.toml", *overrides]) == 3
    told = "".join(capsys.readouterr())
    assert words in told


def test_prompts_that_cannot_be_dealt_out_are_refused() -> None:
    config = GrpoLoop(task=Digit(), rewards=[ExactMatch()], prompts=12, updates=3)
    check_fits(config, dp=4)
    with pytest.raises(RecipeError, match=r"prompts = 12 is not a multiple of data-parallel ranks \(8\)"):
        check_fits(config, dp=8)
