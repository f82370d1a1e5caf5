"""Fields of `[checkpoint]` that torchtitan's users know: the seed, what a run begins with, what it leaves."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.run.conftest import Finished, losses
from titancli.checkpoint import CheckpointReader

Train = Callable[..., Finished]
EXPORTS = ("checkpoint.last_save_model_only=true", "checkpoint.last_save_in_hf=true")


def test_a_seed_checkpoint_is_what_a_run_begins_with(train: Train, here: Path) -> None:
    done = train("tiny.toml", "--run-dir", "seed", "checkpoint.create_seed_checkpoint=true")
    assert done.code == 0, done.err
    assert [path.name for path in (here / "seed/checkpoints").iterdir()] == ["step-0"]
    assert losses(here / "seed") == {}
    shutil.copytree(here / "seed/checkpoints/step-0", here / "step-0")
    assert train("tiny.toml", "--run-dir", "whole").code == 0
    for line in (
        ("seed", "--resume", "checkpoint.create_seed_checkpoint=false"),
        ("tiny.toml", "--run-dir", "other", "weights=step-0", "training.seed=5"),
    ):
        assert train(*line).code == 0
    assert losses(here / "seed") == losses(here / "whole")
    # Another seed would draw other weights; the data of this recipe are in order.
    assert losses(here / "other") == losses(here / "whole")


def test_a_new_run_takes_over_all_state_of_another(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r").code == 0
    whole = ("weights=r/checkpoints/step-4", "checkpoint.initial_load_model_only=false")
    done = train("tiny.toml", "--run-dir", "all", *whole)
    assert done.code == 0, done.err
    assert losses(here / "all") == {step: losses(here / "r")[step] for step in (5, 6)}
    left = 'checkpoint.exclude_from_loading=["step", "data", "guard"]'
    done = train("tiny.toml", "--run-dir", "moments", *whole, left)
    assert done.code == 0, done.err
    assert list(losses(here / "moments")) == [1, 2, 3, 4, 5, 6]
    # Left out once: a resume of the new run takes all of its own checkpoint.
    shutil.rmtree(here / "moments/checkpoints/step-6")
    done = train("moments", "--resume")
    assert done.code == 0, done.err
    assert "from step-4" in done.err
    assert list(losses(here / "moments")) == [1, 2, 3, 4, 5, 6]


def test_moments_that_are_left_out_begin_anew(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r").code == 0
    before = losses(here / "r")
    shutil.rmtree(here / "r/checkpoints/step-6")
    (here / "r/events.jsonl").unlink()
    done = train("r", "--resume", 'checkpoint.exclude_from_loading=["optimizer"]')
    assert done.code == 0, done.err
    after = losses(here / "r")
    assert after[5] == before[5]  # the same weights and data
    assert after[6] != before[6]  # another step
    steps = CheckpointReader(here / "r/checkpoints/step-6", prefix="optimizer.").read("norm.weight.step")
    assert steps == 2


def test_tensors_that_are_left_out_keep_their_initial_values(train: Train, here: Path) -> None:
    seed = ("checkpoint.create_seed_checkpoint=true", "optimizer.lr=0.01")
    assert train("tiny.toml", "--run-dir", "r").code == 0
    weights = ("weights=r/checkpoints/step-6", 'checkpoint.exclude_from_loading=["model.layers.1.*"]')
    assert train("tiny.toml", "--run-dir", "fresh", *seed).code == 0
    assert train("tiny.toml", "--run-dir", "some", *seed, *weights).code == 0
    read = {
        name: CheckpointReader(here / name, prefix="model.")
        for name in ("r/checkpoints/step-6", "fresh/checkpoints/step-0", "some/checkpoints/step-0")
    }
    trained, fresh, some = read.values()
    for name in some.names():
        expected = fresh if name.startswith("layers.1.") else trained
        assert torch.equal(some.read(name), expected.read(name)), name


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (('checkpoint.exclude_from_loading=["dataloader"]',), 3, "did you mean 'data'?"),
        (('checkpoint.exclude_from_loading=["optimizr"]',), 3, "did you mean 'optimizer'?"),
        (("checkpoint.initial_load_model_only=false",), 3, "no checkpoint is given to load the state from"),
        (("checkpoint.enable=false", "checkpoint.last_save_in_hf=true"), 3, "nothing is saved"),
        (("checkpoint.enable=false", "checkpoint.create_seed_checkpoint=true"), 3, "nothing is saved"),
        (("checkpoint.export_dtype=bfloat16",), 3, "nothing is exported"),
        (("weights=folder", "checkpoint.initial_load_model_only=false"), 5, "is not a titan checkpoint"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    train: Train, here: Path, settings: tuple[str, ...], code: int, words: str
) -> None:
    (here / "folder").mkdir()
    done = train("tiny.toml", *settings)
    assert done.code == code, done.err
    assert words in done.err
    assert "Traceback" not in done.err


def test_a_name_that_no_tensor_has_is_told_with_those_there_are(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    done = train("r", "--resume", "training.steps=4", 'checkpoint.exclude_from_loading=["model.head.*"]')
    assert done.code == 3
    assert "'model.head.*' matches nothing in the checkpoint" in done.err
    assert "tensors have names such as 'model." in done.err


def _check_exports(run: Path) -> None:
    last, weights = (CheckpointReader(run / name) for name in ("checkpoints/step-6", "exports/step-6"))
    assert weights.names() == [name for name in last.names() if name.startswith("model.")]
    assert all(
        torch.equal(weights.read(name), last.read(name).to(torch.bfloat16)) for name in weights.names()
    )
    assert weights.manifest.state == {}
    config = json.loads((run / "exports/step-6-hf/config.json").read_text())
    assert config["model_type"] == "llama"
    assert (run / "exports/step-6-hf/model.safetensors").is_file()


def test_weights_are_left_beside_the_state_that_can_be_resumed(train: Train, here: Path) -> None:
    done = train("tiny.toml", "--run-dir", "r", *EXPORTS, "checkpoint.export_dtype=bfloat16")
    assert done.code == 0, done.err
    assert re.search(r"weights only: \S*/exports/step-6\n", done.err)
    [folder] = re.findall(r"Hugging Face folder: (\S*/exports/step-6-hf)\n", done.err)
    assert Path(folder).samefile(here / "r/exports/step-6-hf"), "the path can be pasted"
    _check_exports(here / "r")
    assert train("tiny.toml", "--run-dir", "new", "weights=r/exports/step-6", "training.steps=2").code == 0
    assert train("r", "--resume", "training.steps=7").code == 0
    assert {path.name for path in (here / "r/exports").iterdir()} >= {"step-6", "step-7", "step-7-hf"}
    done = train("r", "--resume")
    assert done.code == 0 and "r is finished: step 7 of 7" in done.err
    assert not (here / "r/exports/step-7-hf-2").exists()
    again = ("--step", "6", "training.steps=7", "training.max_norm=0.1")
    done = train("r", "--resume", *again)
    assert done.code == 0, done.err
    assert re.search(r"Hugging Face folder: \S*/exports/step-7-hf-2\n", done.err)
    first, second = (here / "r/exports" / name / "model.safetensors" for name in ("step-7-hf", "step-7-hf-2"))
    assert first.read_bytes() != second.read_bytes()


@pytest.mark.ranks
def test_two_ranks_leave_the_same(train_on: Callable[..., Finished], here: Path) -> None:
    done = train_on(2, "tiny.toml", "--run-dir", "r", *EXPORTS, "checkpoint.export_dtype=bfloat16")
    assert done.code == 0, done.err
    _check_exports(here / "r")
