"""Small copies: which sizes become small, which stay divisible, and what is reported; without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.specs import size_of
from titan_proof.prove.cases import GIVEN, Case, cases
from titan_proof.prove.proof import Proof, sentence, title
from titan_proof.prove.shrink import Small, shrink
from titancli.recipe import load_recipe

FAMILIES = [
    *("llama3_debug", "llama3_8b", "qwen3_debug", "qwen3_moe_debug", "gpt_oss_20b", "llama4_17bx16e"),
    *("deepseek_v3_671b", "hf_causal_lm_debug", "dpo_debug", "sft_debug", "llama3_405b"),
    "grpo_qwen3_0.6b",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_becomes_small_with_all_kinds_of_layers(name: str, tmp_path: Path) -> None:
    loaded = load_recipe(name)
    small = shrink(loaded, tmp_path).recipe
    assert small.training.mixed_precision_param == "float32" and not small.compile.enable
    if (shape := loaded.recipe.model.shape()) is not None:
        blocks = [s.blocks for s in (shape, small.model.shape())]
        kinds = [(len({repr(b) for b in each}), {type(b.feed_forward) for b in each}) for each in blocks]
        assert kinds[0] == kinds[1]
        assert size_of(small.model) < 1_000_000
    legal = [case for case in cases(small, 4) if case.degrees.get("tp", 1) > 1]
    assert legal and load_recipe(shrink(loaded, tmp_path).file, legal[0].overrides)


def test_cases_of_few_techniques_come_first_and_ep_only_with_experts(tmp_path: Path) -> None:
    dense = cases(shrink(load_recipe("llama3_debug"), tmp_path).recipe, 4)
    sparse = cases(shrink(load_recipe("qwen3_moe_debug"), tmp_path).recipe, 4)
    assert not any("ep" in case.degrees for case in dense) and any("ep" in case.degrees for case in sparse)
    assert [case.ranks for case in dense] == sorted(case.ranks for case in dense)
    assert max(case.ranks for case in cases(load_recipe("llama3_debug").recipe, 2)) == 2
    assert Case((("dp_shard", 2), ("ep", 2))).ranks == 2
    (deep,) = [case for case in dense if case.degrees == {"pp": 4}]
    assert deep.layers == 4 and deep.of_model == ["model.n_layers=4"]


def test_what_rounds_by_the_rows_at_hand_is_accumulated_without_converters_too(tmp_path: Path) -> None:
    small = shrink(load_recipe("llama3_debug"), tmp_path).recipe
    more = {case.name for case in cases(small, 2, by_rows=True)} - {case.name for case in cases(small, 2)}
    given = {
        f"{mesh}{how}" for mesh in ("", "dp_shard 2, ", "tp 2, ", "cp 2, ", "pp 2, ") for how in GIVEN[::2]
    }
    names = given | {"accumulation", "dp_shard 2, accumulation", "cp 2"}
    assert more == {f"{name}, without converters" for name in names}


def test_ways_of_giving_rows(tmp_path: Path) -> None:
    """Routes are those of experts, and pairs of rows are no samples."""
    for name, expected in {
        "llama3_debug": {"samples", "epoch"},
        "qwen3_moe_debug": {"samples", "epoch", "routes"},
        "dpo_debug": {"epoch"},
        "grpo_digit": {"samples", "epoch"},
    }.items():
        found = cases(shrink(load_recipe(name), tmp_path).recipe, 4)
        assert {how for case in found for how in case.how} == expected
        assert all(case.replayed == [how for how in case.how if how == "routes"] for case in found)


def result(status: str, *techniques: str) -> dict[str, object]:
    return {"name": "+".join(techniques), "status": status, "techniques": list(techniques), "reason": "x"}


def test_the_smallest_set_of_techniques_is_the_cause(tmp_path: Path) -> None:
    results = [result("right", "dp_shard"), result("failed", "tp"), result("failed", "dp_shard", "tp")]
    results += [result("failed", "cp", "pp"), result("not supported", "ep")]
    small = Small(tmp_path, None, {}, [], None)  # type: ignore[arg-type]
    causes = Proof(results, small, 0, 0.0).causes
    assert [cause["techniques"] for cause in causes] == [["tp"], ["cp", "pp"]]
    assert title(["tp"]) == "tensor parallel (mesh.tp)"
    assert sentence(causes[0]) == "it fails: x" and sentence(results[-1]) == "not supported: x"
