"""Models of random sizes on random layouts: right, or refused by name."""

from __future__ import annotations

import random

import proof_bugs as bugs
import pytest

from titan_proof.prove.cases import Case, cases
from titan_proof.prove.compare import compared, reference_of
from titan_proof.prove.proof import sentence
from titan_proof.prove.shrink import shrink
from titancli.errors import RecipeError
from titancli.recipe import load_recipe

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def drawn(draw: random.Random) -> tuple[str, list[str]]:
    """Return a recipe and sizes of its model, most of which no layout divides evenly."""
    recipe = draw.choice(["llama3_debug", "qwen3_debug", "qwen3_moe_debug", "deepseek_v3_debug"])
    kv_heads = draw.choice([1, 2, 3, 4])
    heads = kv_heads * draw.choice([1, 2, 3])
    keys = {
        "n_layers": draw.randint(2, 5),
        "dim": heads * 2 * draw.randint(2, 9),
        "n_heads": heads,
        "vocab_size": draw.randint(257, 300),
    }
    if recipe != "deepseek_v3_debug":
        keys["n_kv_heads"] = kv_heads
    if recipe in ("qwen3_debug", "qwen3_moe_debug"):
        keys["head_dim"] = 2 * draw.randint(2, 9)
    if recipe != "qwen3_moe_debug":
        keys["hidden_dim"] = draw.randint(17, 90)
    if recipe in ("qwen3_moe_debug", "deepseek_v3_debug"):
        keys["moe.num_experts"] = draw.choice([4, 6, 8])
        keys["moe.hidden_dim"] = draw.randint(9, 40)
    overrides = [f"model.{key}={value}" for key, value in keys.items()]
    return recipe, [*overrides, f"training.seq_len={draw.choice([8, 12, 16, 20])}"]


@pytest.mark.parametrize("seed", range(24))
def test_random_sizes_on_a_random_layout(ranks, tmp_path, seed):
    draw = random.Random(seed)
    while True:
        recipe, overrides = drawn(draw)
        try:
            small = shrink(load_recipe(recipe, overrides), tmp_path)
        except RecipeError:  # sizes that the model itself refuses
            continue
        legal = []
        for case in cases(small.recipe, 4):
            try:
                load_recipe(small.file, case.overrides)
            except RecipeError:
                continue
            if case.mesh and not {"export", "generation", "compile", "bf16"} & case.techniques:
                legal.append(case)
        if legal:
            break
    case = draw.choice(legal)
    given = (str(small.file), Case(rows=case.rows).overrides + case.of_model, [case.rows])
    reference = reference_of(ranks(1, bugs.seeded, None, *given)[0], ranks(1, bugs.nudged, *given)[0])
    more = (str(tmp_path), case.more)
    found = ranks(case.ranks, bugs.seeded, None, given[0], case.overrides, case.sizes, *more)[0]
    answer = compared(found, reference) | {"techniques": sorted(case.techniques)}
    assert answer["status"] == "right", f"{recipe} {overrides} on {case.name}: {sentence(answer)}"
