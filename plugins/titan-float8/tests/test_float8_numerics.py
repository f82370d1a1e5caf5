"""Float8 gives one answer on any layout, and stays close to what it replaces.

Scales are made from the rows that a rank holds, so the reference for N ranks is one rank that takes the same
rows as N micro-batches: sums against sums.
"""

from __future__ import annotations

import math

import float8_cases
import pytest
import torch
from float8_cases import GATHER, PRECOMPUTE, RECIPES

from tests.engine.cases import Layout
from tests.rows import rows

pytestmark = pytest.mark.ranks

TWO = {"dp_shard": 2}


def distance(found, expected):
    """Return the largest ‖Δ‖ / ‖reference‖ over tensors."""
    assert found.keys() == expected.keys()
    return max(((found[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_give_the_gradients_of_one(ranks, name, dtype):
    fields = RECIPES[name]
    (one,) = ranks(1, float8_cases.gradients, Layout(micro_batches=2, dtype=dtype), fields)
    two = ranks(2, float8_cases.gradients, Layout(TWO, dtype=dtype), fields)
    assert distance(two[0], one) < 1e-6
    assert distance(two[1], one) < 1e-6


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_replicate": 2, "dp_shard": 2},
        pytest.param({"dp_replicate": 2, "dp_shard": 1}, marks=pytest.mark.slow),
    ],
)
def test_replicas_gather_in_float8_too(ranks, mesh):
    world = math.prod(mesh.values())
    (one,) = ranks(1, float8_cases.gradients, Layout(micro_batches=world), GATHER)
    for found in ranks(world, float8_cases.gradients, Layout(mesh), GATHER):
        assert distance(found, one) < 1e-6


def test_a_group_of_float8_weights_is_sent_as_bytes_and_an_uneven_cut_is_padded(ranks):
    """80 rows over 3 ranks are 27, 27 and 26."""
    for found, expected, sent in ranks(3, float8_cases.float8_alone, GATHER):
        assert torch.equal(found, expected)
        assert (sent.dtype, sent.shape) == (torch.uint8, (27, 16))


def test_the_gathered_weights_are_those_that_would_be_cast(ranks):
    """With float32 parameters, gathering in float8 changes no number."""
    for found, expected in zip(
        ranks(2, float8_cases.trained_weights, Layout(TWO), GATHER),
        ranks(2, float8_cases.trained_weights, Layout(TWO), {}),
        strict=True,
    ):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_scales_made_beforehand_change_nothing(ranks):
    for found, expected in zip(
        ranks(2, float8_cases.trained_weights, Layout(TWO, dtype="bfloat16"), PRECOMPUTE),
        ranks(2, float8_cases.trained_weights, Layout(TWO, dtype="bfloat16"), GATHER),
        strict=True,
    ):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "name", rows(RECIPES, slow=[name for name in RECIPES if name not in ("gather", "rowwise")])
)
def test_it_trains_and_stays_close_to_bf16(ranks, name):
    layout = Layout(dtype="bfloat16")
    (found,) = ranks(1, float8_cases.losses, layout, RECIPES[name], 12)
    (bf16,) = ranks(1, float8_cases.losses, layout, None, 12)
    assert found[-1] < 0.7 * found[0]
    assert found != bf16
    assert max(abs(a - b) / b for a, b in zip(found, bf16, strict=True)) < 0.05


@pytest.mark.parametrize(
    ("name", "emulate"),
    rows(
        [("tensorwise", False), ("rowwise", True), ("gather", True)],
        slow=[("gather", True), ("rowwise", True)],
    ),
)
def test_compiled_blocks_give_the_same_gradients(ranks, name, emulate):
    fields = {**RECIPES[name], "emulate": emulate}
    world, mesh = (2, TWO) if name == "gather" else (1, {})
    try:
        compiled = ranks(world, float8_cases.gradients, Layout(mesh, compile="aot_eager"), fields)
    except AssertionError as error:
        if "could not create a primitive descriptor" in str(error):
            pytest.skip("oneDNN has no product of float8 for this CPU")
        raise
    eager = ranks(world, float8_cases.gradients, Layout(mesh), fields)
    assert distance(compiled[0], eager[0]) < 1e-5


def test_emulation_is_close_to_real_float8_products(ranks):
    (real,) = ranks(1, float8_cases.gradients, Layout(), {"emulate": False})
    (emulated,) = ranks(1, float8_cases.gradients, Layout(), {"emulate": True})
    assert 0 < distance(real, emulated) < 1e-3


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_activations_give_the_same_gradients(ranks, mode):
    layout = Layout(TWO, reshard="always", activation_checkpoint={"mode": mode})
    recomputed = ranks(2, float8_cases.gradients, layout, GATHER)[0]
    assert distance(recomputed, ranks(2, float8_cases.gradients, Layout(TWO), GATHER)[0]) < 1e-6
