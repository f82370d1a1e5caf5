"""`titan validate`, `titan train --dry-run` and the start: the same problems, hints and exit code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished, in_this_process
from titancli.runs import RunFolder

Titan = Callable[..., Finished]
HF = ("tokenizer=hf", "tokenizer.path=tok")


@pytest.fixture
def titan(here: Path, capfd: pytest.CaptureFixture[str]) -> Titan:
    return in_this_process(capfd)


def tokenizer(folder: Path, ids: int, **config: str) -> None:
    """Write a Hugging Face tokenizer with so many ids, the first of which ends a text."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    vocab = {"<end>": 0} | {f"t{n}": n for n in range(1, ids)}
    Tokenizer(models.WordLevel(vocab, unk_token="<end>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"} | config))


def a_run(here: Path) -> None:
    run = RunFolder.create("x", here / "other")
    run.write_recipe_lock("[model]\n")


def no_weights(here: Path) -> None:
    (here / "empty").mkdir()


def damaged(here: Path) -> None:
    tokenizer(here / "tok", 10)
    (here / "tok/tokenizer.json").write_text("{}")


def other_model(here: Path) -> None:
    (here / "hf").mkdir()
    (here / "hf/config.json").write_text(json.dumps({"model_type": "mamba"}))


def incomplete(here: Path) -> None:
    (here / "hf").mkdir()
    (here / "hf/config.json").write_text("{")


BROKEN: dict[str, tuple[Callable[[Path], object] | None, tuple[str, ...], str]] = {
    "no data": (None, ('dataset.paths=["gone.txt"]',), "gone.txt does not exist"),
    "no match": (None, ('dataset.paths=["gone/*.txt"]',), "no file matches"),
    "no validation data": (
        None,
        ('validation.datasets.v={type="text_files", paths=["no.txt"]}',),
        "no.txt does not exist",
    ),
    "no tokenizer": (None, HF, "tokenizer.path: "),
    "tokenizer without tokenizer.json": (lambda h: (h / "tok").mkdir(), HF, "has no tokenizer.json"),
    "damaged tokenizer": (damaged, HF, "cannot be read as a tokenizer"),
    "tokenizer without an end": (
        lambda h: tokenizer(h / "tok", 9, eos_token="no such"),
        HF,
        "defines the token that ends a text",
    ),
    "tokenizer with an unknown end": (
        lambda h: tokenizer(h / "tok", 9),
        (*HF, "tokenizer.eos=<none>"),
        "is not a token of",
    ),
    "tokenizer larger than the model": (
        lambda h: tokenizer(h / "tok", 300),
        (*HF, "model.vocab_size=256"),
        "the tokenizer has 300 ids",
    ),
    "no weights": (None, ("weights=gone",), "gone does not exist"),
    "weights that are a run": (a_run, ("weights=other",), "is a run, not one of its checkpoints"),
    "a folder without weights": (no_weights, ("weights=empty",), "is neither a Hugging Face folder"),
    "weights of another family": (other_model, ("weights=hf",), "holds a 'mamba' model"),
    "a damaged config.json": (incomplete, ("weights=hf",), "config.json is damaged"),
    "an unknown key": (None, ("training.stpes=2",), "did you mean 'steps'?"),
    "a schedule that begins too late": (None, ("lr_scheduler.start_step=6",), "before it begins"),
    "an unknown component": (None, ("loss=nothing",), "unknown loss 'nothing'"),
    "an unknown flavor": (None, ("model.flavor=7B",), "has no flavor '7B'"),
    "text for a number": (None, ('training.steps="10"',), "must be an integer"),
    "no steps": (None, ("training.steps=0",), "must be more than 0"),
    "a rate that is no number": (None, ("optimizer.lr=nan",), "nan and inf are not allowed"),
    "an odd batch": (None, ("training.global_batch_size=7", "training.local_batch_size=2"), "7"),
    "ranks that do not divide": (None, ("mesh.tp=3",), "3"),
    "adapters without a base": (None, ('converters=[{type="lora"}]',), "adapters need a base"),
    "a plugin that is not there": (None, ('requires.plugins=["titan-nothing"]',), "titan-nothing"),
    "a store that is a word": (None, ("checkpoint.remote=bucket",), "bucket"),
    "an unknown schedule": (None, ("pipeline.schedule=Fast",), "Fast"),
    "a variable of the shell": (None, ('env.LD_PRELOAD="x"',), "LD_PRELOAD"),
    "an unknown launcher": (None, ("launcher=ray",), "unknown launcher 'ray'"),
    "a name that is a path": (None, ("name=../x",), "name"),
    "a key of another trainer": (None, ("learning_rate=1e-4",), "in titan: optimizer.lr=1e-4"),
    "a choice in place of a type": (None, ("lr_scheduler=cosine",), "decay_type"),
    "two weights": (None, ("weights=a.bin",), "a.bin"),
    "a loop without its task": (None, ("loop=grpo",), "needs 'task'"),
}


def problems(done: Finished) -> list[str]:
    """Return the lines of what is wrong, and the hints, without those of one command alone."""
    lines = (line.strip() for line in done.err.splitlines())
    return [line for line in lines if line and not re.match(r"(note|run folder|looking|tiny.toml):", line)]


@pytest.mark.parametrize("name", BROKEN)
def test_three_commands_one_answer(titan: Titan, here: Path, name: str) -> None:
    prepare, overrides, words = BROKEN[name]
    if prepare is not None:
        prepare(here)
    checked = titan("validate", "tiny.toml", *overrides)
    shown = titan("train", "tiny.toml", "--run-dir", "r", *overrides, "--dry-run")
    started = titan("train", "tiny.toml", "--run-dir", "r", *overrides)
    assert words in started.err
    assert problems(checked) == problems(shown) == problems(started)
    assert checked.code == shown.code == started.code != 0
    assert not (here / "r").exists()  # known before anything is written


def test_the_hint_for_a_run_can_be_used(titan: Titan, here: Path) -> None:
    assert titan("train", "tiny.toml", "--run-dir", "first", "training.steps=1").code == 0
    failed = titan("train", "tiny.toml", "--run-dir", "second", "weights=first")
    change = re.search(r"give its newest checkpoint: (\S+)", failed.err)
    assert failed.code == 5 and change is not None
    assert titan("validate", "tiny.toml", change[1]).code == 0


def test_a_pattern_without_a_match_is_a_note(titan: Titan, here: Path) -> None:
    usual = ('optimizer.no_decay=["*bias*", "*norm*"]', "training.steps=1")
    said = "optimizer.no_decay: '*bias*' matches no parameter"
    assert titan("validate", "tiny.toml", *usual).code == 0
    shown = titan("train", "tiny.toml", *usual, "--dry-run")
    assert shown.code == 0 and said in shown.out and "'*norm*'" not in shown.out
    started = titan("train", "tiny.toml", *usual, "--run-dir", "r")
    assert started.code == 0 and f"warning: {said}" in started.err


@pytest.mark.parametrize("fits", [True, False])
def test_a_dry_run_says_whether_it_fits(
    titan: Titan, monkeypatch: pytest.MonkeyPatch, here: Path, fits: bool
) -> None:
    gib = 20.0 if fits else 2**-14
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else round(gib * 2**18))
    done = titan("train", "tiny.toml", "--dry-run")
    assert done.code == 0, done.err
    assert ("GiB here: it fits" if fits else "it does not fit: `titan plan` proposes changes") in done.out


def test_files_that_are_elsewhere(titan: Titan, here: Path) -> None:
    missing = 'dataset.paths=["/cluster/only.txt"]'
    assert titan("validate", "tiny.toml", missing).code == 5
    assert titan("validate", "tiny.toml", missing, "--recipe-only").code == 0
    assert titan("validate", "tiny.toml", "training.stpes=2", "--recipe-only").code == 3
    shutil.rmtree(here / "runs", ignore_errors=True)
