"""`titan prove` on the command line: a plugin whose loss is wrong, the messages, and the exit codes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Titan, titan  # noqa: F401 - a fixture
from titan_proof.prove.proof import prove
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


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Use a cache folder for the badges of this test alone."""
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_loss_of_a_plugin_that_averages_averages_is_found(titan: Titan, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "cli_mean_loss.py"
    file.write_text(LOSS)
    done = titan("prove", "cli_mean_loss/mean", "-p", str(file), "--ranks", "1", "--json")
    assert "loss/cli_mean_loss/mean in the recipe llama3_debug" in done.err
    document = json.loads(done.out)
    assert (done.code, document["schema"], document["ok"]) == (1, "titan.proof", False)
    status = {case["name"]: case["status"] for case in document["cases"]}
    # each has several averages in a step
    assert {name for name, one in status.items() if one == "wrong"} == {"accumulation", "samples", "epoch"}
    cause = next(cause for cause in document["causes"] if cause["techniques"] == ["accumulation"])
    assert "it is the loss, its weight" in cause["message"]
    assert document["changed"]["model.n_layers"] == {"from": 6, "to": 2}
    # And `titan plugin list` shows it, until the plugin changes.
    (badge,) = proofs_of(titan, file)
    causes = ["accumulation", "epoch", "samples"]
    assert (badge["component"], badge["ok"], badge["causes"]) == ("loss/mean", False, causes)
    assert badge["stale"] == [] and badge["ranks"] == 1 and badge["cases"]["wrong"] == 3
    assert "1 proven wrong" in titan("plugin", "list", "-p", str(file)).out
    file.write_text(LOSS + "\n# mended\n")
    assert proofs_of(titan, file)[0]["stale"] == ["the code of cli_mean_loss has changed"]
    assert "stale: the code of" in titan("plugin", "show", "cli_mean_loss", "-p", str(file)).out


NEEDY = """
from titancli import component, hookimpl

@component("loss", "needy", target="cli_needy:build")
class Needy:
    \"\"\"Has no default.\"\"\"

    temperature: float
    \"\"\"Of nothing.\"\"\"

@hookimpl
def titan_components():
    return [Needy]
"""


PICKY = """
from titancli import component, hookimpl

@component("loss", "picky", target="cli_picky:build")
class Picky:
    \"\"\"Refuses what a proof sets.\"\"\"

    def check(self, recipe):
        if recipe.training.global_batch_size == 8:
            yield "", "it takes steps of 3 rows"

@hookimpl
def titan_components():
    return [Picky]
"""


def test_a_recipe_that_cannot_be_shrunk_says_which_value_stands_in_the_way(
    titan: Titan,  # noqa: F811
    tmp_path: Path,
) -> None:
    flux = [f"model.{key}" for key in ("dim=3072", "n_heads=24", "axes_dim=[16,56,56]")]
    done = titan("prove", "titan-flux:flux_debug", *flux, "--ranks", "1")
    assert done.code == 3
    assert "the model cannot be made small" in done.err and "model.dim = 3072" in done.err
    file = tmp_path / "cli_picky.py"
    file.write_text(PICKY)
    done = titan("prove", "llama3_debug", "-p", str(file), "loss=picky")
    assert done.code == 3 and "no small copy of this recipe is valid: it takes steps of 3 rows" in done.err
    assert "8 of them in a step" in done.err and "Traceback" not in done.err
    assert titan("prove", "llama3_debug", "--ranks", "5").code == 2
    assert titan("prove").code == 2


def test_gpus_are_refused_where_there_are_fewer_than_ranks(
    titan: Titan,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for gpus, hint in ((0, "use --device cpu"), (2, "use --ranks 2")):
        monkeypatch.setattr("titan_proof.prove.proof.visible_gpus", lambda found=gpus: found)
        done = titan("prove", "llama3_debug", "--device", "cuda")
        assert done.code == 5 and f"need 4 GPUs, but {gpus} are visible" in done.err and hint in done.err


def proofs_of(titan: Titan, file: Path) -> list[dict[str, Any]]:  # noqa: F811
    plugins = json.loads(titan("plugin", "list", "-p", str(file), "--json").out)["plugins"]
    found: list[dict[str, Any]] = next(p for p in plugins if p["name"] == file.stem)["proofs"]
    return found


def test_a_component_that_cannot_be_proven_alone_says_what_to_give(titan: Titan, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "cli_needy.py"
    file.write_text(NEEDY)
    for named, code, words in [
        (
            "dataset/jsonl",
            2,
            ["cannot be proven alone: the rows of a proof are random", "titan prove RECIPE"],
        ),
        ("loop/grpo", 2, ["a proof calls the engine itself"]),
        ("logger/csv", 2, ["a logger takes no part in a step"]),
        ("cli_needy/needy", 4, ["cannot be proven alone", "'temperature'", "loss.KEY=VALUE"]),
        ("titan/nosuch", 4, ["unknown component"]),
        ("nosuch", 3, ["there is no recipe 'nosuch'"]),
        ("optimizer/adamw optimizer.lr=-1", 3, ["override", "optimizer.lr=-1"]),
    ]:
        done = titan("prove", *named.split(), "-p", str(file), "--ranks", "1")
        assert done.code == code, done.err
        assert all(word in done.err for word in words), done.err


@pytest.mark.slow
def test_two_proofs_at_once() -> None:
    with ThreadPoolExecutor() as threads:
        proofs = threads.map(lambda _: prove(load_recipe("llama3_debug"), ranks=2), range(2))
        assert not any(proof.wrong for proof in proofs)
