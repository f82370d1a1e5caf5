"""titan-muon is a package of its own, and trains from its wheel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packaging.conftest import CHECKOUT, Environment, wheel_of

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def muon(titan_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("muon") / "venv")
    project = CHECKOUT / "plugins" / "titan-muon"
    environment.install(titan_wheel, wheel_of(project, tmp_path_factory.mktemp("wheel-muon")))
    return environment


def test_its_wheel_brings_the_component(muon: Environment) -> None:
    plugins = {p["name"]: p for p in json.loads(muon.titan("plugin", "list", "--json").stdout)["plugins"]}
    assert (plugins["titan-muon"]["state"], plugins["titan-muon"]["torch"]) == ("ok", False)
    assert plugins["titan-muon"]["components"] == ["optimizer/muon"]


def test_a_resolved_recipe_names_it_and_its_fallback_in_full(muon: Environment) -> None:
    done = muon.titan("recipe", "show", "llama3_debug", "optimizer=muon", "optimizer.fallback=adamw")
    assert 'type = "titan-muon/muon"' in done.stdout and 'type = "titan/adamw"' in done.stdout


@pytest.mark.slow  # the plugin's own tests have ranks that have torch already
def test_two_ranks_train_with_it(muon: Environment) -> None:
    small = [
        "training.steps=2",
        "lr_scheduler.warmup_steps=1",
        "training.seq_len=32",
        "model.dim=64",
        "model.n_layers=1",
    ]
    small += ["training.local_batch_size=1", "metrics.log_freq=1", "checkpoint.interval=1"]
    done = muon.titan("train", "llama3_debug", "optimizer=muon", *small, "--nproc", "2", "--run-dir", "r")
    assert done.returncode == 0, done.stderr
    manifest = (muon.cwd / "r" / "checkpoints" / "step-2" / "metadata.json").read_text()
    assert "optimizer.layers.0.attention.wq.weight.momentum_buffer" in manifest
