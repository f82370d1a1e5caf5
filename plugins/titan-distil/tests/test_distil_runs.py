"""Whole runs: they learn, resume byte for byte, survive a kill, and refuse by name what does not fit."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from distil_cases import WIDE, mine, recipes, save_teacher, with_weights

from tests.engine.cases import small, whole_batch
from tests.ranks import Ranks
from tests.run.conftest import (  # noqa: F401 - fixtures
    Command,
    Finished,
    command,
    here,
    losses,
    train,
    train_on,
)
from titan_distil import DistilLoss, Teacher
from titan_distil.teacher import Teacher as Frozen
from titan_proof.digests import read_digests
from titancli import IGNORE, Batch, Engine, TitanError, build
from titancli.observe.events import read_events

TEACH = ("training.steps=4", "model.dim=64", "--run-dir", "t", "checkpoint.last_save_in_hf=true")
DISTIL = (
    "loss=distil",
    "optimizer.lr=1e-2",
    "lr_scheduler.total_steps=6",
    'loop.type="distil"',
    "loop.teacher.dtype=float32",
)
OF_RUN = (*DISTIL, "loop.teacher.weights=t/checkpoints/step-2")


def test_a_run_learns_from_a_checkpoint_or_a_folder_and_resumes_byte_for_byte(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    assert train("tiny.toml", *TEACH).code == 0
    held_out = ('validation.datasets.x={type="text_files", paths=["text.txt"]}', "validation.steps=2")
    done = train("tiny.toml", *OF_RUN, "--run-dir", "whole", *held_out, "validation.freq=3")
    assert done.code == 0, done.err
    whole = losses(here / "whole")
    assert whole[6] < 0.7 * whole[1]
    events = read_events(here / "whole/events.jsonl")
    *_, last = (e["metrics"] for e in events if e["event"] == "step")
    assert last["divergence"] == last["loss"] != last["cross_entropy"]
    assert last["time/teacher"] > 0
    first, *_, end = (e["metrics"] for e in events if e["event"] == "validation")
    assert end["validation/x/divergence"] < first["validation/x/divergence"]
    assert train("tiny.toml", *OF_RUN, "--run-dir", "parts", "training.steps=3").code == 0
    done = train("parts", "--resume", "training.steps=6")
    assert done.code == 0, done.err
    assert {**losses(here / "parts")} == whole
    digests = read_digests(here / "whole")
    assert read_digests(here / "parts") == digests and list(digests) == [1, 2, 3, 4, 5, 6]
    # The checkpoint of the end and its Hugging Face folder are the same teacher.
    [folder] = (here / "t").glob("**/config.json")
    shutil.copytree(folder.parent, here / "hf")
    shutil.copytree(here / "t/checkpoints/step-4", here / "step-4")
    shutil.rmtree(here / "t")
    for name in ("hf", "step-4"):
        line = (*DISTIL, f"loop.teacher.weights={name}", "training.steps=2")
        done = train("tiny.toml", *line, "--run-dir", f"of-{name}")
        assert done.code == 0, done.err
    assert losses(here / "of-hf") == losses(here / "of-step-4")


@pytest.mark.e2e
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    train: Callable[..., Finished],  # noqa: F811
    command: Callable[..., Command],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    assert train("tiny.toml", *TEACH).code == 0
    steps = (
        "training.steps=40",
        "lr_scheduler.total_steps=40",
        "checkpoint.interval=5",
        "checkpoint.keep_latest_k=0",
    )
    assert train("tiny.toml", *OF_RUN, *steps, "--run-dir", "whole").code == 0
    running = command("tiny.toml", *OF_RUN, *steps, "--run-dir", "killed")
    running.until_step(here / "killed/events.jsonl", 6)
    running.process.send_signal(signal.SIGKILL)
    running.wait()
    assert max(losses(here / "killed")) < 40
    done = train("killed", "--resume")
    assert done.code == 0, done.err
    assert losses(here / "killed") == losses(here / "whole")
    assert read_digests(here / "killed")[40] == read_digests(here / "whole")[40]


@pytest.mark.ranks
def test_two_ranks_make_the_run_of_one(
    train: Callable[..., Finished],  # noqa: F811
    train_on: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    assert train("tiny.toml", *TEACH).code == 0
    line = ("tiny.toml", *OF_RUN, "training.global_batch_size=4", "training.mixed_precision_param=float32")
    assert train(*line, "--run-dir", "one").code == 0
    layouts = {"fsdp": (), "tp": ("mesh.tp=2",), "mixed": ("mesh.tp=2", "loop.teacher.mesh.cp=2")}
    for name, layout in layouts.items():
        done = train_on(2, *line, *layout, "--run-dir", name)
        assert done.code == 0, done.err
        assert losses(here / name) == pytest.approx(losses(here / "one"), rel=3e-6)
    done = train_on(2, *line, "mesh.tp=2", "loop.teacher.mesh.dp_shard=2", "--run-dir", "wrong")
    assert done.code != 0
    assert "loop.teacher.mesh has 2 data-parallel ranks, the student's mesh 1" in done.err


def test_what_does_not_fit_is_refused_by_name(
    train: Callable[..., Finished],  # noqa: F811
    here: Path,  # noqa: F811
) -> None:
    assert train("tiny.toml", *TEACH).code == 0
    for line, message in {
        (*OF_RUN, "loss=sft"): 'it has its own loss, not sft: set loss = "distil"',
        ("loss=distil",): 'it needs a teacher: set [loop] type = "distil"',
        (*DISTIL,): "loop.teacher.weights is missing|teacher",
        (*DISTIL, "loop.teacher.weights=hf://a/b"): "must be a folder on this machine",
        (*OF_RUN, "mesh.pp=2", "--nproc", "2"): "distil does not support pipelines",
        (*OF_RUN, "loop.teacher.mesh.pp=2"): "a teacher cannot be a pipeline",
        (*OF_RUN, "model.vocab_size=300"): "the teacher's vocabulary has 2048 tokens, the student's 300",
        (*OF_RUN, "loss.beta=1.0"): "beta",
    }.items():
        done = train("tiny.toml", *line)
        assert done.code in (2, 3) and any(part in done.err for part in message.split("|")), (line, done.err)
    done = train("tiny.toml", *DISTIL, "loop.teacher.weights=gone")
    assert done.code == 5 and "loop.teacher.weights: " in done.err and "does not exist" in done.err
    (here / "empty").mkdir()
    done = train("tiny.toml", *DISTIL, "loop.teacher.weights=empty")
    assert done.code == 3 and "config.json does not exist" in done.err
    done = train("tiny.toml", *OF_RUN, 'loop.teacher.model={type="llama3", flavor="debugmodel", dim=32}')
    assert done.code != 0 and "t/checkpoints/step-2" in done.err


Build = Callable[..., tuple[Engine, Frozen]]


@pytest.fixture
def built() -> Iterator[Build]:
    """Yield a student and its teacher, and close them at the end."""
    with ExitStack() as ends:

        def call(*arguments: Any) -> tuple[Engine, Frozen]:
            engine, teacher = pair(*arguments)
            ends.callback(engine.close)
            ends.callback(teacher.close)
            return engine, teacher

        yield call


def pair(folder: Path, loss: DistilLoss, **teacher: Any) -> tuple[Engine, Frozen]:
    config = Teacher(**{"weights": folder, "model": WIDE, "dtype": "float32", **teacher})
    own = recipes(small(), loss, config)
    engine = Engine.build(own)
    return engine, Frozen(engine, own, config)


def test_two_students_with_teachers_of_their_own_do_not_mix(built: Build, tmp_path: Path) -> None:
    first, second = save_teacher(tmp_path / "a"), save_teacher(tmp_path / "b", scale=2.0)
    batch = with_weights(whole_batch())
    found = []
    for order in ((first, second), (second, first)):
        pairs = [built(folder, DistilLoss()) for folder in order]
        given = [(engine, teacher(batch)) for engine, teacher in pairs]
        found += [[float(engine.forward_backward(own)["loss"]) for engine, own in given]]
    assert found[0] == found[1][::-1] and found[0][0] != found[0][1]


def test_an_error_in_the_middle_leaves_both_usable_and_nothing_is_no_loss(
    built: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, teacher = built(save_teacher(tmp_path), DistilLoss(sft_weight=0.5))
    [batch] = mine(engine, with_weights(whole_batch()))
    expected = float(engine.forward_backward(teacher(batch))["loss"])
    engine.clear_gradients()
    with pytest.raises(TitanError, match="no teacher: the batch lacks teacher_hidden"):
        engine.forward_backward(batch)
    with pytest.raises(TitanError, match=r"the batch's teacher_hidden are \[8, 16, 3\], not \[8, 16, 48\]"):
        engine.forward_backward(Batch({**batch, "teacher_hidden": torch.zeros(8, 16, 3)}))
    with pytest.raises(TitanError, match="tokens"):
        teacher(Batch({**batch, "tokens": batch["tokens"] + 64}))
    with monkeypatch.context() as patch:
        patch.setattr(engine.loss._divergence.__class__, "_compare", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.forward_backward(teacher(batch))
    assert float(engine.forward_backward(teacher(batch))["loss"]) == expected
    engine.clear_gradients()
    # Rows without a target, beside hidden states that are not numbers.
    none = teacher(Batch({**batch, "targets": torch.full_like(batch["targets"], IGNORE)}))
    none = Batch({**none, "teacher_hidden": torch.full_like(none["teacher_hidden"], torch.nan)})
    assert float(engine.forward_backward(none)["loss"]) == 0
    assert all(not p.grad.any() for _, p in engine.named_parameters())
    with pytest.raises(TitanError, match="the loss distil has no teacher"):
        build(DistilLoss()).check_batch(none)


def disagree(folder: Path, rank_dtypes: tuple[str, str]) -> str:
    import torch.distributed as dist

    try:
        pair(folder, DistilLoss(), dtype=rank_dtypes[dist.get_rank()])
    except TitanError as error:
        return error.message
    return ""


@pytest.mark.ranks
def test_ranks_that_disagree_about_the_teacher_all_say_so(ranks: Ranks, tmp_path: Path) -> None:
    folder = ranks(1, save_teacher, tmp_path)[0]
    for said in ranks(2, disagree, folder, ("float32", "bfloat16")):
        assert "ranks" in said and said


def test_a_teacher_whose_vocabulary_differs_is_refused_without_a_recipe_too(
    built: Build, tmp_path: Path
) -> None:
    engine, teacher = built(save_teacher(tmp_path), DistilLoss())
    batch = teacher(with_weights(whole_batch()))
    teacher._loss.teacher.weight = teacher._loss.teacher.weight[:60]
    with pytest.raises(TitanError, match="the teacher's vocabulary has 60 tokens, the student's 64"):
        engine.forward_backward(batch)
