"""Stored distributions: they make the run that a live teacher makes, and nothing else is taken for them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished, here, losses, train, train_on  # noqa: F401 - fixtures
from titan_proof.digests import read_digests

BYTES = ("tiny.toml", "model.vocab_size=258", "training.mixed_precision_param=float32")
LINE = (*BYTES, "training.global_batch_size=4", "lr_scheduler.total_steps=6")
TEACHER = ("model.dim=64", "weights=t/checkpoints/step-4")
STORE = (*LINE, *TEACHER, 'loop={type="distil_store", k=257}', "--run-dir")
DISTIL = (*LINE, "loss=distil", "optimizer.lr=1e-2", 'loop.type="distil"', "loop.teacher.dtype=float32")
LIVE = "loop.teacher.weights=t/checkpoints/step-4"
TOPK = "loop.teacher.topk=s/topk"


@pytest.fixture
def teacher(train: Callable[..., Finished]) -> None:  # noqa: F811
    assert train(*BYTES, "model.dim=64", "training.steps=4", "--run-dir", "t").code == 0


@pytest.mark.ranks
@pytest.mark.usefixtures("teacher")
def test_stored_distributions_make_the_run_of_a_live_teacher_on_any_layout(
    train: Callable[..., Finished],  # noqa: F811
    train_on: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    done = train_on(2, *STORE, "s", "mesh.tp=2")
    assert done.code == 0, done.err
    assert json.loads((here / "s/topk/topk.json").read_text())["files"] == {
        "topk-00000-00000.safetensors": 24
    }
    assert train(*DISTIL, LIVE, "--run-dir", "live").code == 0
    done = train(*DISTIL, TOPK, "--run-dir", "whole")
    assert done.code == 0, done.err
    assert losses(here / "whole") == pytest.approx(losses(here / "live"), rel=2e-5)
    done = train_on(2, *DISTIL, TOPK, LIVE, "--run-dir", "two")
    assert done.code == 0, done.err
    assert losses(here / "two") == pytest.approx(losses(here / "whole"), rel=3e-6)
    assert train(*DISTIL, TOPK, "--run-dir", "parts", "training.steps=3").code == 0
    done = train("parts", "--resume", "training.steps=6")
    assert done.code == 0, done.err
    assert read_digests(here / "parts") == read_digests(here / "whole")
    # Two ranks with different rows, and a smaller k.
    done = train_on(2, *STORE, "s2", "loop.k=8")
    assert done.code == 0, done.err
    assert len(json.loads((here / "s2/topk/topk.json").read_text())["files"]) == 2
    assert train(*DISTIL, "loop.teacher.topk=s2/topk", "--run-dir", "eight").code == 0
    for step, value in losses(here / "eight").items():
        assert 0 < value < losses(here / "live")[step]


@pytest.mark.usefixtures("teacher")
def test_what_was_made_of_something_else_is_refused_by_name(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    assert train(*STORE, "s", "loop.k=4").code == 0
    for line, message in {
        (TOPK, "training.seed=1"): "was made of another data",
        (TOPK, "training.seq_len=16"): "was made of another seq_len",
        (TOPK, "model.vocab_size=300"): "was made of another vocabulary: 258, not 300",
        (TOPK, "loop.teacher.weights=t/checkpoints/step-2"): "was made of another teacher",
        (TOPK, "training.steps=20"): "s/topk has nothing of a row that begins with the tokens [",
        (TOPK, "loss.temperature=2.0"): "have the temperature 1",
        (TOPK, 'validation.datasets.x={type="text_files", paths=["text.txt"]}'): "nothing is stored of",
        ("loop.teacher.topk=s",): "s/topk.json does not exist",
        ("loop.teacher.topk=none",): "none does not exist",
        (): "the teacher needs weights, or topk",
    }.items():
        done = train(*DISTIL, *line)
        assert done.code != 0 and message in done.err, (line, done.err)
    text = here / "text.txt"
    text.write_text("another " + text.read_text())
    done = train(*DISTIL, TOPK)
    assert done.code != 0 and "was made of another data" in done.err
    text.write_text(text.read_text().removeprefix("another "))
    assert train(*DISTIL, TOPK, "--run-dir", "good").code == 0
    for name, damage in {
        "topk.json": lambda data: data[: len(data) // 2],
        "topk-00000-00000.safetensors": lambda data: data[:100],
    }.items():
        shutil.copytree(here / "s", here / "d", dirs_exist_ok=True)
        (here / "d/topk" / name).write_bytes(damage((here / "d/topk" / name).read_bytes()))
        done = train(*DISTIL, "loop.teacher.topk=d/topk")
        assert done.code == 5 and "or a file beside it, is damaged" in done.err, done.err
    for line, message in {
        (*STORE, "x", "loop.k=258"): "the model's vocabulary has only 258 tokens",
        (*LINE, 'loop.type="distil_store"'): "distil_store needs the teacher's weights",
    }.items():
        done = train(*line)
        assert done.code == 3 and message in done.err


@pytest.mark.usefixtures("teacher")
def test_an_interrupted_store_leaves_nothing_that_is_read(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from titan_distil.store import Writer

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "add", lambda *_: 1 / 0)
        assert train(*STORE, "s").code == 1
    assert not (here / "s/topk/topk.json").exists()
    done = train(*DISTIL, TOPK)
    assert done.code != 0 and "s/topk/topk.json does not exist" in done.err


@pytest.mark.usefixtures("teacher")
def test_a_store_of_somebody_else_opens_nothing_outside_and_waits_for_nothing(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    assert train(*STORE, "s", "loop.k=4").code == 0
    index = json.loads((here / "s/topk/topk.json").read_text())
    [(name, rows)] = index["files"].items()
    for files in (
        {"../../t/checkpoints/step-4/model.safetensors": 1},
        {"/etc/passwd": 1},
        {"a\x1b]0;x": 1},
        3,
    ):
        (here / "s/topk/topk.json").write_text(json.dumps({**index, "files": files}))
        done = train(*DISTIL, TOPK)
        assert done.code == 5 and "is damaged" in done.err and "\x1b]0" not in done.err
    for k in (3, -1, "x"):
        (here / "s/topk/topk.json").write_text(json.dumps({**index, "k": k}))
        assert "is damaged" in train(*DISTIL, TOPK).err
    (here / "s/topk/topk.json").write_text(json.dumps(index))
    (here / "s/topk" / name).unlink()
    os.mkfifo(here / "s/topk" / name)
    done = train(*DISTIL, TOPK)
    assert done.code != 0 and name in done.err and rows == 24
