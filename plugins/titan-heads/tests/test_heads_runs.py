"""Whole runs: they learn, resume bit for bit, export, start from what they export, and refuse by name."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.run.conftest import (  # noqa: F401 - fixtures
    Finished,
    here,
    in_this_process,
    losses,
    train,
    train_on,
)
from titan_heads import RewardModel
from titan_heads.model import outputs
from titan_proof.digests import read_digests
from titan_testing import run_cli
from titancli import Batch, Engine, Sample, TitanError, build
from titancli.data.jsonl import BadRow
from titancli.observe.events import read_events
from titancli.protocols.samples import Completion, Prompt

DATA = 'dataset={type="labelled",path="./labels.jsonl",classes=["even","odd"]}'
CLASSES = 'loss={type="classification",classes=["even","odd"],pad_id=0}'
PAIRS = 'dataset={type="reward_pairs",path="titan:sums_pairs"}'
SMALL = ("tiny.toml", "tokenizer=byte", "training.mixed_precision_param=float32", "loop=sft")
OF_CLASSES = (*SMALL, CLASSES, DATA, "training.seq_len=32", "training.local_batch_size=8")
OF_REWARD = (*SMALL, "loss=reward", PAIRS, "training.seq_len=64", "training.local_batch_size=8")
Train = Callable[..., Finished]


@pytest.fixture
def labels(here: Path) -> Path:  # noqa: F811
    """Texts of digits with the parity of the last one: what a model of two layers learns."""
    draw = random.Random(0)
    with (here / "labels.jsonl").open("w") as file:
        for _ in range(400):
            text = "".join(draw.choice("0123456789") for _ in range(draw.randint(1, 12)))
            file.write(json.dumps({"text": text, "label": ("even", "odd")[int(text) % 2]}) + "\n")
    return here


def metrics_of(run: Path) -> dict[str, Any]:
    *_, last = (e["metrics"] for e in read_events(run / "events.jsonl") if e["event"] == "step")
    return last


def test_a_classifier_learns_resumes_bit_for_bit_and_goes_on_from_its_export(
    train: Train,  # noqa: F811
    labels: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    steps = ("training.steps=30", "optimizer.lr=1e-2", "checkpoint.interval=10")
    done = train(*OF_CLASSES, *steps, "--run-dir", "whole")
    assert done.code == 0, done.err
    assert metrics_of(labels / "whole")["accuracy"] > 0.95
    assert train(
        *OF_CLASSES, *steps, "lr_scheduler.total_steps=30", "training.steps=20", "--run-dir", "parts"
    )
    done = train("parts", "--resume", "training.steps=30")
    assert done.code == 0, done.err
    assert losses(labels / "parts") == losses(labels / "whole")
    assert read_digests(labels / "parts")[30] == read_digests(labels / "whole")[30]

    titan = in_this_process(capfd)
    done = titan("convert-checkpoint", "whole", "hf", "--to", "hf", "--verify")
    assert done.code == 0 and "verified: yes" in done.out, done.err
    assert "AutoModelForSequenceClassification" in done.out
    from transformers import AutoModelForSequenceClassification

    theirs = AutoModelForSequenceClassification.from_pretrained("hf").eval()
    assert theirs.config.label2id == {"even": 0, "odd": 1} and theirs.config.pad_token_id == 0
    texts = [list(text) for text in (b"7", b"1234", b"98")]
    with Engine.frozen("whole") as engine:
        ours = outputs(engine, texts)
        # A kernel may sum in another order where the shape is another.
        one_by_one = outputs(engine, [Sample(one, [0.0] * len(one)) for one in texts], rows=1)
        torch.testing.assert_close(one_by_one, ours, atol=1e-5, rtol=0)
        engine.export("again-hf")
    assert ours.argmax(1).tolist() == [1, 0, 0]
    with torch.no_grad():
        padded = torch.tensor([one + [0] * (4 - len(one)) for one in texts])
        found = theirs(input_ids=padded, attention_mask=(padded != 0).long()).logits
        assert (found - ours).abs().max() < 1e-5
    weights = "model.safetensors"
    assert (labels / "again-hf" / weights).read_bytes() == (labels / "hf" / weights).read_bytes()

    # A run that starts from the folder starts with its head; from a language model with a fresh one.
    assert train(*OF_CLASSES, "weights=hf", "training.steps=1", "--run-dir", "from").code == 0
    first = losses(labels / "from")[1]
    assert first < 0.2 and "keep their initial values" not in done.err
    other = CLASSES.replace('["even","odd"]', '["odd","even"]')
    swapped = DATA.replace('["even","odd"]', '["odd","even"]')
    done = train(*OF_CLASSES, other, swapped, "weights=hf")
    assert done.code != 0 and "has the outputs ['even', 'odd'], but the loss ['odd', 'even']" in done.err
    done = train(*OF_REWARD, "weights=whole/checkpoints/step-30", "training.steps=1", "--run-dir", "x")
    assert done.code != 0 and "loss.score.weight" in done.err


def test_a_language_model_gets_a_fresh_head_and_the_run_says_so(train: Train, labels: Path) -> None:  # noqa: F811
    plain = ("tiny.toml", "tokenizer=byte", "training.steps=1", "checkpoint.last_save_in_hf=true")
    assert train(*plain, "--run-dir", "plain").code == 0
    [config] = (labels / "plain").glob("**/config.json")
    for name, weights in (("hf", config.parent), ("titan", "plain/checkpoints/step-1")):
        done = train(*OF_CLASSES, f"weights={weights}", "training.steps=1", "--run-dir", name)
        assert done.code == 0, done.err
        assert "loss" in done.err and ("initial values" in done.err or "left as they are" in done.err)
    assert losses(labels / "hf") == losses(labels / "titan")


def test_a_reward_model_with_adapters_exports_whole_and_rates_completions(
    train: Train,  # noqa: F811
    here: Path,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain = ("tiny.toml", "tokenizer=byte", "training.steps=1", "training.seq_len=64")
    assert train(*plain, "--run-dir", "plain").code == 0
    lora = ("weights=plain/checkpoints/step-1", 'converters=[{type="lora",rank=4}]', "optimizer.lr=1e-2")
    done = train(*OF_REWARD, *lora, "training.steps=4", "--run-dir", "reward")
    assert done.code == 0, done.err
    assert {"reward_accuracy", "reward_margin"} <= metrics_of(here / "reward").keys()
    done = in_this_process(capfd)("convert-checkpoint", "reward", "hf", "--to", "hf", "--verify")
    assert done.code == 0 and "verified: yes" in done.out, done.err

    prompt = Prompt("What is 2 + 3?")
    answer = Completion(text="5", tokens=[53], logprobs=[0.0], finish="eos")
    rate = build(RewardModel(checkpoint=here / "reward"))
    score = rate(prompt, answer)
    talk = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": "5"}]
    with Engine.frozen("reward") as engine:
        assert engine.tokenizer is not None
        assert score == pytest.approx(outputs(engine, [engine.tokenizer.chat(talk)]).item(), abs=1e-6)
    with pytest.raises(TitanError, match="more than 64 of the reward model's rows"):
        rate(Prompt("x" * 80), answer)
    with pytest.raises(BadRow, match="chat template takes no 'tools'"):  # a prompt's own are not dropped
        rate(Prompt("q", options={"tools": [{"type": "function"}]}), answer)
    assert train(*OF_REWARD, "training.steps=1", "checkpoint.enable=false", "--run-dir", "kept").code == 0
    for checkpoint, why in (
        ("plain", "is not of a reward model"),
        ("gone", "gone is neither a checkpoint with a recipe nor a run that has a good one"),
        ("kept", "kept is neither a checkpoint with a recipe nor a run that has a good one"),
    ):
        with pytest.raises(TitanError, match=why):
            build(RewardModel(checkpoint=here / checkpoint))

    grpo = (
        'loop.rewards=[{type="reward_model",checkpoint="./reward"}]',
        *("loop.prompts=2", "loop.samples=2", "loop.eval_freq=0", "loop.task=sum", "training.seq_len=40"),
        *("loop.generator.max_new_tokens=3", "training.steps=1", "model.dim=32", "--run-dir", "rl"),
    )
    done = train("grpo_digit", *grpo)
    assert done.code == 0, done.err
    assert metrics_of(here / "rl")["reward_failed"] == 0


def test_what_does_not_fit_is_refused_before_the_run(train: Train, labels: Path) -> None:  # noqa: F811
    preference = 'dataset={type="preference",path="titan:sums_pairs"}'
    triples = 'dataset={type="embedding_pairs",path="./x.jsonl",negatives=true}'
    for line, message in {
        (*OF_REWARD, preference): 'it needs pairs of whole rows: set type = "reward_pairs" in [dataset]',
        (*OF_REWARD, "dataset.reference_logps=true"): "a reward needs no reference model",
        (*OF_REWARD, "dataset.trailing_newline=true"): "no token is predicted",
        (*OF_CLASSES, "loss.classes=['odd','even']"): "dataset.classes must be the same, in the same order",
        (*OF_CLASSES, "loss.classes=['odd']"): "needs the names of at least 2",
        (*OF_CLASSES, "loss.problem_type=regression"): "a regression has no classes",
        (*OF_CLASSES, "dataset.several=true"): "dataset.several is true",
        (*OF_CLASSES[:4], DATA, "loss=embedding"): "it needs anchors and positives",
        (*SMALL, "loss=embedding", triples, "training.local_batch_size=4"): "an example takes 3 rows",
        (*SMALL, "loss=embedding", triples, "training.local_batch_size=3"): "no anchor has a negative",
        (*SMALL, "loss=sft", triples): "the loss sft predicts tokens, which these rows do not ask for",
        (*OF_REWARD, "loop=dpo"): 'set loop = "sft"',
    }.items():
        done = train(*line)
        assert done.code in (2, 3) and message in done.err, (line[-1], done.err)
    (labels / "labels.jsonl").write_text('{"text": "1", "label": "neither"}\n')
    done = train(*OF_CLASSES, "dataset.strict=true")
    assert done.code != 0 and "labels.jsonl, line 1: 'label' is 'neither'" in done.err


@pytest.mark.ranks
def test_a_reward_model_is_proven_with_its_export() -> None:
    """The output layer, which the export of a reward model lacks, is not compared."""
    done = run_cli("prove", "titan-heads:reward_debug", "--ranks", "1")
    assert done.code == 0, done.stdout
    assert "export" in done.stdout and "wrong" not in done.stdout


def test_two_ranks_make_the_run_of_one(train: Train, train_on: Train, labels: Path) -> None:  # noqa: F811
    line = (*OF_CLASSES, "training.global_batch_size=16", "training.local_batch_size=8", "dataset.pack=false")
    assert train(*line, "--run-dir", "one").code == 0
    for name, layout in {"fsdp": (), "tp": ("mesh.tp=2",)}.items():
        done = train_on(2, *line, *layout, "--run-dir", name)
        assert done.code == 0, done.err
        assert losses(labels / name) == pytest.approx(losses(labels / "one"), rel=3e-6)


def test_two_engines_at_once_and_an_error_in_the_middle_do_not_mix(train: Train, labels: Path) -> None:  # noqa: F811
    for seed in (1, 2):
        assert (
            train(*OF_CLASSES, f"training.seed={seed}", "training.steps=1", "--run-dir", str(seed)).code == 0
        )
    texts = [list(b"12"), list(b"7")]
    alone = []
    for run in "12":
        with Engine.frozen(run) as engine:
            alone.append(outputs(engine, texts))
    with Engine.frozen("1") as first, Engine.frozen("2") as second:
        for one, expected in ((first, alone[0]), (second, alone[1]), (first, alone[0])):
            assert torch.equal(outputs(one, texts), expected)
        with pytest.raises(TitanError, match="tokens"):
            outputs(first, [[5000]])
        with pytest.raises(TitanError, match="sample 1 has no tokens"):
            outputs(first, [[1], []])
        assert first.loss.kept is None
        assert torch.equal(outputs(first, texts), alone[0])
    assert not torch.equal(*alone)


def says(run: str, ids: list[list[int]], overrides: list[str]) -> torch.Tensor | str:
    os.chdir(Path(run).parent)
    try:
        with Engine.frozen(run, overrides) as engine:
            return outputs(engine, ids)
    except TitanError as error:
        return error.message


@pytest.mark.ranks
def test_ranks_of_any_layout_say_the_same_and_a_pipeline_is_refused(
    ranks: Ranks,
    train: Train,  # noqa: F811
    labels: Path,
) -> None:
    assert train(*OF_CLASSES, "training.steps=1", "--run-dir", "run").code == 0
    ids = [list(b"12"), list(b"7"), list(b"123456789")]
    [expected] = ranks(1, says, str(labels / "run"), ids, [])
    for layout in ([], ["mesh.tp=2"], ["mesh.cp=2"]):
        for found in ranks(2, says, str(labels / "run"), ids, layout):
            assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
            assert (found - expected).norm() <= 3e-6 * expected.norm()
    pipeline = ["mesh.pp=2", "pipeline.microbatch_size=4", "training.local_batch_size=8"]
    for found in ranks(2, says, str(labels / "run"), ids, pipeline):
        assert found == "a pipeline does not return what a head says"


def test_no_head_is_refused_by_name() -> None:
    from tests.engine.cases import recipe, small

    with Engine.build(recipe(small())) as engine:
        with pytest.raises(TitanError, match="has no head of titan-heads"):
            outputs(engine, [[1, 2]])
        with pytest.raises(TitanError, match="units of 1"):
            from titan_heads import Embedding

            engine.evaluate(
                Batch({"tokens": torch.ones(2, 4, dtype=torch.int64), "targets": torch.ones(2, 4).long()}),
                Embedding(),
            )
