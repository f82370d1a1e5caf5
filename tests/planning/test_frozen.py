"""Frozen models beside the trained one are counted as they are stored."""

from __future__ import annotations

import pytest

from tests.planning.measure import planned
from titancli import Engine
from titancli.recipe import load_recipe

BF16 = "training.dtype=bfloat16"
LORA = ('converters=[{type = "lora", rank = 8}]', "weights=base")


@pytest.mark.parametrize("overrides", [(), (BF16,)], ids=("fp32", "bf16"))
def test_a_reference_takes_what_its_engine_does(overrides: tuple[str, ...]) -> None:
    recipe = load_recipe("dpo_debug", overrides).recipe
    with Engine.frozen(recipe, device="cpu") as engine:
        size = sum(p.nbytes for part in engine.parts for p in part.parameters())
    found = planned(recipe, 1).worst
    assert found.classes["frozen"] == size == found.classes["parameters"]


def test_each_rank_has_its_part_of_the_reference() -> None:
    recipe = load_recipe("dpo_debug", ["mesh.pp=3", "mesh.dp_shard=2", "pipeline.microbatch_size=2"]).recipe
    ranks = planned(recipe, 6).ranks
    assert [rank.classes["frozen"] for rank in ranks] == [4 * rank.parameters for rank in ranks]


@pytest.mark.parametrize(
    "overrides",
    [
        LORA,
        ('loss={type = "sft"}', "loop=sft", 'dataset={type = "chat", path = "titan:sums_chat"}'),
        ("dataset.reference_logps=true",),
    ],
    ids=("adapters", "sft", "stored"),
)
def test_where_none_is_built_none_is_counted(overrides: tuple[str, ...]) -> None:
    recipe = load_recipe("dpo_debug", overrides).recipe
    assert planned(recipe, 1).worst.classes["frozen"] == 0


def test_on_the_cpu_it_takes_nothing_of_the_gpu() -> None:
    recipe = load_recipe("dpo_debug", ["parallelize.cpu_offload=true"]).recipe
    assert planned(recipe, 1, "H100").worst.classes["frozen"] == 0


def test_grpo_with_a_penalty_has_a_reference_and_without_none() -> None:
    for coefficient, times in ((0.0, 0), (0.1, 1)):
        recipe = load_recipe("grpo_digit", [f"loss.kl_coef={coefficient}"]).recipe
        found = planned(recipe, 1).worst.classes
        assert found["frozen"] == times * found["parameters"]


def test_the_check_says_that_it_leaves_them_out_and_compares_without_them() -> None:
    from titancli.run.check import check

    found = check(load_recipe("dpo_debug").recipe, 1)
    (rank,) = found["ranks"]
    assert rank["computed_peak_bytes"] == pytest.approx(rank["peak_bytes"], rel=0.03)
    assert found["left_out"] == ["frozen models beside the trained one"]
