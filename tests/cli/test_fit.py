"""What only shows when a run starts is told at the recipe's own line, before anything is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Titan
from titancli.run import start

LOSS = """
from titancli import component, hookimpl

@component("loss", "gpu_only", target="cli_gpu:build", device="cuda")
class GpuOnly:
    "Needs a GPU."

@hookimpl
def titan_components():
    return [GpuOnly]
"""
RECIPE = 'extends = "titan:llama3_debug"\nweights = "w"\n[mesh]\ndp_replicate = 3\ndp_shard = 1\n'


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "visible_gpus", lambda: 0)


def exp(text: str) -> None:
    Path("exp.toml").write_text(text)


def test_degrees_that_do_not_make_the_ranks(titan: Titan) -> None:
    exp(RECIPE.replace('weights = "w"\n', ""))
    done = titan("train", "exp.toml", "--run-dir", "r", "--nproc", "2")
    assert done.code == 3 and " --> exp.toml:" in done.err and "does not make 2 ranks" in done.err
    assert not Path("r").exists()


def test_a_batch_that_does_not_divide_over_the_ranks(titan: Titan) -> None:
    done = titan("train", "llama3_debug", "training.global_batch_size=8", "--nproc", "2", "--run-dir", "r")
    assert done.code == 3 and "training.global_batch_size=8" in done.err
    assert "use 16, or another local_batch_size" in done.err and not Path("r").exists()


def test_a_component_that_needs_a_gpu(titan: Titan) -> None:
    Path("cli_gpu.py").write_text(LOSS)
    exp('extends = "titan:llama3_debug"\n[loss]\ntype = "gpu_only"\n')
    assert titan("validate", "exp.toml", "-p", "./cli_gpu.py").code == 0
    done = titan("train", "exp.toml", "--run-dir", "r", "-p", "./cli_gpu.py")
    assert done.code == 3 and " --> exp.toml:3:" in done.err
    assert "the loss gpu_only needs a GPU" in done.err and not Path("r").exists()


def test_settings_that_need_a_gpu(titan: Titan) -> None:
    exp(
        'extends = "titan:llama3_debug"\n[parallelize]\ncpu_offload = true\nasync_tp = true\n'
        "[compile]\nenable = true\n"
    )
    assert titan("validate", "exp.toml").code == 0
    done = titan("train", "exp.toml", "--run-dir", "r")
    assert done.code == 3 and " --> exp.toml:3:" in done.err and " --> exp.toml:4:" in done.err
    assert "cpu_offload moves parameters between the CPU and a GPU, but no GPU is visible" in done.err
    assert not Path("r").exists()


def test_compiling_without_openssl(titan: Titan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = titan("train", "llama3_debug", "compile.enable=true", "--run-dir", "r")
    assert done.code == 5 and "needs g++ and openssl on a CPU, not found on PATH" in done.err
    assert "apt install g++ openssl" in done.err and not Path("r").exists()


def test_degrees_that_only_the_ranks_decide(titan: Titan) -> None:
    exp('extends = "titan:llama3_debug"\n[mesh]\ntp = -1\ndp_shard = 1\n')
    assert titan("validate", "exp.toml").code == 0
    done = titan("train", "exp.toml", "--run-dir", "r", "--nproc", "3")
    assert done.code == 3 and " --> exp.toml:3:" in done.err and not Path("r").exists()
    assert "mesh.tp = 3 does not divide" in done.err and "1, 2, 4, 8 or 16 can" in done.err


def test_weights_of_another_model(titan: Titan) -> None:
    from titancli.models.blocks.hf import DecoderHF
    from titancli.recipe import load_recipe

    exp(RECIPE)
    Path("w").mkdir()
    own = DecoderHF(load_recipe("exp.toml").recipe.model).config_json()
    Path("w/config.json").write_text(json.dumps({**own, "hidden_size": 4096, "rope_theta": 1e4}))
    for command in (["train", "exp.toml", "--run-dir", "r"], ["validate", "exp.toml"]):
        done = titan(*command)
        assert done.code == 3 and " --> exp.toml:2:" in done.err
        assert "dim is 256 in the recipe and 4096 there" in done.err and "vocab_size" not in done.err
        assert "rope_theta is 500000.0 in the recipe and 10000.0 there" in done.err
        assert "set in [model]: rope_theta = 10000.0; dim = 4096" in done.err.replace("\n", " ")


def test_a_checkpoint_of_another_model(titan: Titan) -> None:
    Path("w").mkdir()
    Path("w/recipe.lock.toml").write_text('[model]\ntype = "lab/other"\ndim = 256\n')
    Path("w/manifest.json").write_text("{}")
    exp(RECIPE)
    assert "holds a 'lab/other' model, but this recipe trains a 'llama3'" in titan("train", "exp.toml").err
