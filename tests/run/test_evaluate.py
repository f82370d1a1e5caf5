"""`titan eval`: the figures of [validation] and of transformers, afterwards and on any layout."""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.run.conftest import Finished, here, on_pool, train  # noqa: F401 - fixtures
from titancli import registry
from titancli.cli import main
from titancli.loops.validation import Evaluation, Result
from titancli.observe.events import read_events

SET = 'validation.datasets.held_out={type="text_files", paths=["held-out.txt"]}'
SMALL = ("model.vocab_size=258", "validation.freq=4", SET)


@pytest.fixture
def evaluate(here: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Finished]:  # noqa: F811
    """`titan eval ...` inside this process."""
    (here / "held-out.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(40)))

    def run(*arguments: str) -> Finished:
        try:
            return Finished(main(["eval", *arguments]), *capfd.readouterr())
        finally:
            registry.configure()

    return run


def temporary(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Let temporary folders be made in `tmp`."""
    (here / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here / "tmp"))


def validated(run: Path) -> dict[int, dict[str, float]]:
    """What a run's own evaluations said, by step."""
    events = (e for e in read_events(run / "events.jsonl") if e["event"] == "validation")
    return {e["step"]: {name.split("/")[2]: v for name, v in e["metrics"].items()} for e in events}


@pytest.mark.ranks
def test_it_gives_what_validation_gave_at_that_step_on_any_layout(
    train: Callable[..., Finished],  # noqa: F811
    evaluate: Callable[..., Finished],
    here: Path,  # noqa: F811
    ranks: Ranks,
) -> None:
    # Two ranks of two rows each could not train with this batch.
    assert train("tiny.toml", "--run-dir", "r", *SMALL, "training.global_batch_size=2").code == 0
    Path("text.txt").unlink()  # the data of training are not needed
    own = validated(here / "r")
    done = evaluate("r", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert (document["schema"], document["version"]) == ("titan.evaluation", 1)
    assert list(document)[2:] == ["source", "step", "checkpoint", "evaluations"]
    assert list(document["evaluations"][0]) == ["name", "data", "metrics", "file"]
    assert (document["step"], document["checkpoint"]) == (6, str(here / "r/checkpoints/step-6"))
    [row] = document["evaluations"]
    assert row["metrics"].items() >= own[6].items()
    size = (here / "held-out.txt").stat().st_size
    assert (row["metrics"]["tokens"], row["metrics"]["bytes"]) == (
        size,
        size,
    )  # with the end, without the first
    bits = own[6]["loss"] / math.log(2)
    assert row["metrics"]["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    kept = json.loads((here / "r/evaluations/step-6/held_out.json").read_text())
    assert kept["metrics"] == row["metrics"] and row["file"].endswith("r/evaluations/step-6/held_out.json")
    assert evaluate("r", "--step", "4").code == 0
    kept = json.loads((here / "r/evaluations/step-4/held_out.json").read_text())
    assert kept["metrics"].items() >= own[4].items()
    for layout in ("mesh.tp=2", "mesh.dp_shard=2", "mesh.pp=2"):
        done = evaluate(
            "r/checkpoints/step-6", "--json", "--data", "held-out.txt", layout, *on_pool(ranks, 2)
        )
        assert done.code == 0, done.err
        [row] = json.loads(done.out)["evaluations"]
        assert (row["name"], row["metrics"]["tokens"]) == ("held-out", size)
        assert row["metrics"]["loss"] == pytest.approx(own[6]["loss"], rel=1e-6)


@pytest.mark.ranks
def test_a_hugging_face_folder_has_the_loss_that_transformers_finds(
    train: Callable[..., Finished],  # noqa: F811
    evaluate: Callable[..., Finished],
    here: Path,  # noqa: F811
) -> None:
    from transformers import AutoModelForCausalLM

    assert train("tiny.toml", "--run-dir", "r", *SMALL, "training.steps=2").code == 0
    assert main(["convert-checkpoint", "r", "hf", "--to", "hf"]) == 0
    evaluate("r", "nothing")  # drains what was printed
    words = ("tokenizer=byte", "training.seq_len=32", "--data", "held-out.txt", "--json")
    done = evaluate("hf", *words)
    assert done.code == 0, done.err
    [row] = json.loads(done.out)["evaluations"]
    assert row["file"] is None and json.loads(done.out)["step"] is None
    ids = torch.tensor([*(here / "held-out.txt").read_bytes(), 256])
    model = AutoModelForCausalLM.from_pretrained(here / "hf")
    losses = []
    for start in range(0, len(ids) - 1, 32):
        with torch.no_grad():
            logits = model(ids[None, start : start + 32]).logits[0].float()
        targets = ids[start + 1 : start + 33]
        losses.append(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none"))
    assert row["metrics"]["loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


PAIRS = (
    *("dpo_debug", "model.dim=32", "model.n_layers=1", "model.hidden_dim=64", "training.steps=2"),
    *("validation.steps=1", 'validation.datasets.pairs={type="preference", path="titan:sums_pairs"}'),
)


def test_adapters_and_pairs_are_evaluated_as_their_runs_did(
    train: Callable[..., Finished],  # noqa: F811
    evaluate: Callable[..., Finished],
    here: Path,  # noqa: F811
) -> None:
    assert train("tiny.toml", "--run-dir", "base", *SMALL, "training.steps=2").code == 0
    lora = ("weights=base/checkpoints/step-2", 'converters=[{type="lora", rank=2}]', "optimizer.lr=1e-1")
    assert train("tiny.toml", "--run-dir", "lora", *SMALL, *lora).code == 0
    assert train(*PAIRS, "--run-dir", "dpo").code == 0
    for name, last in {"lora": 6, "dpo": 2}.items():
        done = evaluate(name, "--json")
        assert done.code == 0, done.err
        [row] = json.loads(done.out)["evaluations"]
        own = validated(here / name)
        assert row["metrics"].items() >= own[last].items() and own[last]["loss"] != own[0]["loss"]


def test_what_it_cannot_evaluate_is_refused_by_name(
    train: Callable[..., Finished],  # noqa: F811
    evaluate: Callable[..., Finished],
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    temporary(here, monkeypatch)
    cases: dict[tuple[str, ...], tuple[int, str]] = {
        ("r",): (2, "there is nothing to evaluate: the recipe has no [validation.datasets]"),
        ("nowhere",): (5, "nowhere does not exist"),
        (str(here),): (5, "is not a run, a checkpoint or a Hugging Face folder"),
        ("r", "--step", "3"): (5, "r has no checkpoint of step 3"),
        ("r/checkpoints/step-2", "--step", "2"): (2, "--step needs a run, but"),
        ("r", "--data", "gone.txt"): (5, "validation.datasets.gone.paths: "),
        ("r", "r"): (2, "eval takes one run, checkpoint or folder, not r and r"),
        ("r", "--data", "held-out.txt", "mesh.tp=3"): (3, "mesh.tp"),
        ("r", "--data", "held-out.txt", "training.global_batch_size=3"): (3, "training.global_batch_size"),
        ("r", "--data", "held-out.txt", "training.seq_len=x"): (3, "training.seq_len must be an integer"),
    }
    for arguments, (code, words) in cases.items():
        done = evaluate(*arguments)
        assert done.code == code and words in done.err, (arguments, done)
    assert not (here / "r/evaluations").exists() and not list((here / "tmp").iterdir())
    (here / "empty.txt").write_text("")
    done = evaluate("r", "--data", "empty.txt")
    assert done.code == 5 and "validation.datasets.empty: " in done.err, done


def test_a_signal_ends_it_without_results_and_numbers_that_are_not_finite_are_text(
    train: Callable[..., Finished],  # noqa: F811
    evaluate: Callable[..., Finished],
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train("tiny.toml", "--run-dir", "r", *SMALL, "training.steps=2").code == 0
    temporary(here, monkeypatch)
    go = Evaluation.__call__
    for name, code in {"SIGINT": 130, "SIGTERM": 75}.items():

        def signalled(self: Evaluation, *arguments: Any, name: str = name) -> Any:
            os.kill(os.getpid(), getattr(signal, name))
            return go(self, *arguments)

        monkeypatch.setattr(Evaluation, "__call__", signalled)
        done = evaluate("r", "--json")
        assert (done.code, done.out) == (code, "")
        assert f"{name}: stopping the evaluation" in done.err and "saving" not in done.err
        assert not (here / "r/evaluations").exists() and not list((here / "tmp").iterdir())

    found = Result({"loss": math.nan, "perplexity": math.inf}, 3.0)
    monkeypatch.setattr(Evaluation, "__call__", lambda *arguments: found)
    done = evaluate("r", "--json")
    assert done.code == 0, done.err
    assert evaluate("r").out.startswith("held_out: loss nan, perplexity inf, tokens 3")
    [row] = json.loads(done.out, parse_constant=pytest.fail)["evaluations"]
    kept = (here / "r/evaluations/step-2/held_out.json").read_text()
    assert json.loads(kept, parse_constant=pytest.fail)["metrics"] == row["metrics"]
    assert (row["metrics"]["loss"], row["metrics"]["perplexity"]) == ("NaN", "Infinity")
