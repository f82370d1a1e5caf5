"""Files that would run code if anybody unpickled them, given to the commands that read weights."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished, trained
from titancli.checkpoint import read_manifest
from titancli.checkpoint.format.manifest import manifest_bytes
from titancli.models.blocks.hf import DecoderHF
from titancli.recipe import load_recipe

Train = Callable[..., Finished]


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


BOMB = pickle.dumps(_Bomb())


@pytest.fixture
def hostile(here: Path) -> Path:
    """What torch.distributed.checkpoint, Hugging Face and torch.save write, each with a bomb in it."""
    for name, files in {
        "dcp": [".metadata", "__0_0.distcp"],
        "hf": ["pytorch_model.bin"],
        "sharded": ["pytorch_model-00001-of-00001.bin"],
    }.items():
        (here / name).mkdir()
        for file in files:
            (here / name / file).write_bytes(BOMB)
        if name != "dcp":
            (here / name / "config.json").write_text(
                json.dumps(DecoderHF(load_recipe("tiny.toml").recipe.model).config_json())
            )
    (here / "model.pt").write_bytes(BOMB)
    return here


def test_the_bomb_would_go_off(hostile: Path) -> None:
    pickle.loads((hostile / "dcp/.metadata").read_bytes())
    assert (hostile / "exploded").is_dir()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("dcp", "is neither a Hugging Face folder"),
        ("hf", "holds pickled weights (pytorch_model"),
        ("sharded", "holds pickled weights (pytorch_model"),
        ("model.pt", "model.pt"),
    ],
)
def test_a_run_refuses_them_and_nothing_is_executed(
    train: Train, hostile: Path, capfd: pytest.CaptureFixture[str], weights: str, words: str
) -> None:
    from titancli.cli import main

    done = train("tiny.toml", f"weights={weights}", "--run-dir", "r")
    assert done.code in (3, 5), done.err
    assert words in done.err
    for arguments in (
        ["convert-checkpoint", weights, "out", "--to", "titan"],
        ["convert-checkpoint", weights, "out", "--to", "hf"],
        ["checkpoint", "verify", weights],
        ["checkpoint", "show", weights],
    ):
        assert main(arguments) != 0, arguments
        assert "Traceback" not in capfd.readouterr().err
    assert "Traceback" not in done.err
    assert not (hostile / "exploded").exists()


@pytest.mark.parametrize(
    "state",
    [
        {"engine": {"step": "4", "tokens_seen": 0}, "data": {}},
        {"engine": [], "data": {}},
        {"engine": {"step": 4, "tokens_seen": 0, "guard": {"in_a_row": None}}, "data": {}},
        {"engine": {"step": 4, "tokens_seen": 0}, "data": 3},
        {"engine": {"step": 4, "tokens_seen": 0}},
        {"engine": {"step": 4, "tokens_seen": 0}, "data": {"version": 1, "data": {}}},
    ],
)
def test_a_forged_state_is_refused_in_words(train: Train, checkpoint: Path, state: dict[str, Any]) -> None:
    """Its checksum is right: whoever can write a checkpoint can do that."""
    forged = dataclasses.replace(read_manifest(checkpoint), state=state)
    (checkpoint / "manifest.json").write_bytes(manifest_bytes(forged))
    done = train("tiny.toml", f"weights={checkpoint}", "checkpoint.initial_load_model_only=false")
    assert done.code == 5, done.err
    assert "Traceback" not in done.err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trained(folder, "--run-dir", "r", "training.steps=1")
    return folder / "r/checkpoints/step-1"


@pytest.fixture
def checkpoint(saved: Path, here: Path) -> Path:
    """A good one, of the same recipe and data."""
    shutil.copytree(saved, here / "step-1")
    return here / "step-1"


def test_a_checkpoint_with_a_pickle_in_it_is_passed_over(train: Train, hostile: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r", "training.steps=4").code == 0
    for name in (".metadata", "__0_0.distcp", "optimizer.pt"):
        shutil.copy(hostile / "model.pt", hostile / "r/checkpoints/step-4" / name)
    done = train("r", "--resume", "training.steps=5")
    assert done.code == 0, done.err
    [line] = [line for line in done.err.splitlines() if "step-4 is skipped" in line]
    assert ".metadata is not listed in the manifest" in line
    assert "from step-2" in done.err
    assert not (hostile / "exploded").exists()
