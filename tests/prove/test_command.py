"""`titan prove` as people run it: a plugin whose loss is wrong, what is said, and the exit codes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.conftest import Titan, titan  # noqa: F401 - a fixture
from titancli.prove.proof import prove
from titancli.recipe import load_recipe

LOSS = """
from titancli import LossResult, component, hookimpl

@component("loss", "mean", target="cli_mean_loss:build")
class Mean:
    \"\"\"Average of each batch: an average of averages.\"\"\"

class MeanLoss:
    output = "logprobs"
    def __call__(self, out, batch):
        return LossResult(-out.sum() / (batch["targets"] != -100).sum(), out.new_ones(()))

def build(config):
    return MeanLoss()

@hookimpl
def titan_components():
    return [Mean]
"""


def test_a_loss_of_a_plugin_that_averages_averages_is_found(titan: Titan, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "cli_mean_loss.py"
    file.write_text(LOSS)
    done = titan("prove", "llama3_debug", "-p", str(file), "loss=mean", "--ranks", "1", "--json")
    document = json.loads(done.out)
    assert (done.code, document["schema"], document["ok"]) == (1, "titan.proof", False)
    status = {case["name"]: case["status"] for case in document["cases"]}
    assert status.pop("accumulation") == "wrong" and set(status.values()) == {"right"}
    (cause,) = document["causes"]
    assert cause["techniques"] == ["accumulation"] and "it is the loss, its weight" in cause["message"]
    assert document["changed"]["model.n_layers"] == {"from": 6, "to": 2}


def test_a_recipe_that_cannot_be_shrunk_says_which_value_stands_in_the_way(titan: Titan) -> None:  # noqa: F811
    flux = [f"model.{key}" for key in ("dim=3072", "n_heads=24", "axes_dim=[16,56,56]")]
    done = titan("prove", "titan-flux:flux_debug", *flux, "--ranks", "1")
    assert done.code == 3
    assert "the model cannot be made small" in done.err and "model.dim = 3072" in done.err
    assert titan("prove", "llama3_debug", "--ranks", "5").code == 2
    assert titan("prove").code == 2


@pytest.mark.slow
def test_two_proofs_at_once() -> None:
    with ThreadPoolExecutor() as threads:
        proofs = threads.map(lambda _: prove(load_recipe("llama3_debug"), ranks=2), range(2))
        assert not any(proof.wrong for proof in proofs)
