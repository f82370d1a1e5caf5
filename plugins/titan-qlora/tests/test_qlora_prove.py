"""`titan prove` on recipes with a quantized base: every layout is right, or refused by name."""

from __future__ import annotations

import pytest

from titan_proof.prove.proof import Proof, prove, sentence
from titancli.recipe import load_recipe

DENSE = ("llama3_debug", "converters=[{type = 'qlora'}]", "weights=./w")
EXPERTS = (
    "qwen3_moe_debug",
    "converters=[{type = 'qlora', targets = ['experts.*', 'wo']}]",
    "weights=./w",
    "model.moe.load_balance_coeff=0",
)


def proven(ranks: int, name: str, *overrides: str) -> Proof:
    proof = prove(load_recipe(name, list(overrides)), ranks=ranks)
    assert not proof.wrong, [sentence(cause) for cause in proof.causes]
    return proof


def names(proof: Proof, status: str) -> set[str]:
    return {result["name"] for result in proof.results if result["status"] == status}


def test_a_quantized_base_is_proven_and_compile_is_refused() -> None:
    proof = proven(1, *EXPERTS)
    refused = [result for result in proof.results if result["status"] == "not supported"]
    assert names(proof, "right") >= {"accumulation", "recompute full", "resume", "export", "generation"}
    assert [result["techniques"] for result in refused] == [["compile"]]
    assert "not compiled yet" in refused[0]["reason"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_every_layout_of_four_ranks_is_right(recipe: tuple[str, ...]) -> None:
    proof = proven(4, *recipe)
    right = {"dp_shard 2", "dp_shard 4", "dp_replicate 2", "tp 2", "tp 4", "cp 2", "pp 2", "tp 2, export"}
    right |= {"dp_shard 2, tp 2"}
    assert names(proof, "right") >= right | ({"dp_shard 2, ep 2"} if recipe is EXPERTS else set())
    cases = [result for result in proof.results if result["status"] == "not supported"]
    assert all("compile" in case["techniques"] for case in cases), cases
