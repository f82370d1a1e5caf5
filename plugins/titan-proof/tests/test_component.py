"""Recipes around components, and badges; without ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_proof.prove.badge import write_badges
from titan_proof.prove.compare import compared, not_finite, reference_of
from titan_proof.prove.component import computing, label_of, recipe_around
from titan_proof.prove.measure import Results
from titan_proof.prove.proof import Proof
from titan_proof.prove.shrink import Small
from titancli.recipe import load_recipe
from titancli.registry import badges as reader
from titancli.registry import current
from titancli.registry.badges import badge_folder, badges


@pytest.mark.parametrize(
    ("kind", "name", "recipe"),
    [
        ("model", "titan/qwen3", "qwen3_moe_debug"),
        ("model", "hf_causal_lm", "hf_causal_lm_debug"),
        ("model", "flux", "flux_debug"),
        ("loss", "cispo", "llama3_debug"),
        ("loss", "flow_matching", "flux_debug"),
        ("optimizer", "muon", "llama3_debug"),
        ("parallelize", "decoder", "llama3_debug"),
        ("converter", "float8_linear", "llama3_debug"),
        ("converter", "lora", "llama3_debug"),
    ],
)
def test_a_recipe_around_each_kind(kind: str, name: str, recipe: str) -> None:
    config = current().find(kind, name)
    loaded = recipe_around(config, [])
    assert loaded.recipe.name == recipe and config in computing(loaded)


def test_overrides_apply_and_may_not_replace_the_component() -> None:
    adamw = current().find("optimizer", "adamw")
    assert recipe_around(adamw, ["optimizer.lr=0.5"]).recipe.optimizer.lr == 0.5
    with pytest.raises(Exception, match="an override replaces it"):
        recipe_around(adamw, ["optimizer=muon"])


def proof(*statuses: str) -> Proof:
    results: list[dict[str, Any]] = [{"status": s, "techniques": [], "name": s} for s in statuses]
    return Proof(results, Small(Path(), None, {}, [], None), 0, 0.0)  # type: ignore[arg-type]


def test_badges_of_a_component_and_of_all_that_a_recipe_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = load_recipe("titan-flux:flux_debug")
    assert write_badges(proof("right", "wrong"), loaded, 4, None) == []  # which one is at fault is unknown
    write_badges(proof("right", "not supported"), loaded, 4, None)
    assert {b["component"] for b in badges("titan-flux")} == {"model/flux", "loss/flow_matching"}
    assert {b["component"] for b in badges("titan")} == {"optimizer/adamw", "parallelize/decoder"}
    flux = current().find("model", "flux")
    assert label_of(flux) == "model/titan-flux/flux"
    write_badges(proof("right", "failed"), loaded, 2, flux)  # the newest counts
    found = {b["component"]: b for b in badges("titan-flux")}
    assert found["model/flux"]["ok"] is False and found["loss/flow_matching"]["ok"] is True
    assert all(b["stale"] == [] for b in found.values())


def test_a_badge_is_stale_after_a_change_and_a_damaged_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (path,) = write_badges(proof("right"), load_recipe("llama3_debug"), 4, current().find("loss", "sft"))
    assert path.parent == badge_folder() / "titan"
    monkeypatch.setattr(reader, "code_hash", lambda plugin, file: "another")
    monkeypatch.setattr(reader, "package_versions", lambda names: {"titancli": "9", "torch": "2.99"})
    (found,) = badges("titan")
    assert found["stale"][0] == "the code of titan has changed"
    assert found["stale"][2].startswith("torch ") and found["stale"][2].endswith(" then, 2.99 now")
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "cases"}
    for text in ("{", "[]", json.dumps({"code": None}), json.dumps(older)):
        path.write_text(text)
        (found,) = badges("titan")
        assert found["ok"] is None and "cannot be read" in found["stale"][0]


def test_a_reference_that_is_not_finite_is_named_not_passed_over() -> None:
    def results(gradient: float, weight: float = 1.0) -> Results:
        numbers = {"0 initial a": 1.0, "0 loss": 2.0, "0 gradient a": gradient, "0 norm": 1.0}
        numbers |= {"0 initial mask": -math.inf, "0 weight mask": -math.inf, "1 weight a": weight}
        return Results({key: torch.tensor(number) for key, number in numbers.items()})

    assert not_finite(results(3.0)) is None
    assert not_finite(results(math.nan)) == "the gradient of a is not finite (step 1)"
    assert not_finite(results(3.0, math.inf)) == "after the optimizer step, a is not finite (step 2)"
    reference = reference_of(results(math.nan), results(math.nan))
    assert compared(results(5.0), reference)["status"] == "right"  # it is compared with nothing
