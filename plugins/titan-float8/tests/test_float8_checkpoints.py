"""Weights are saved plain: what float8 wrote loads without it, and the other way round."""

from __future__ import annotations

import float8_cases
import pytest
import torch
from float8_cases import GATHER, PRECOMPUTE

from tests.engine.cases import Layout

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("saver", "loader"),
    [(GATHER, None), (None, GATHER), (PRECOMPUTE, PRECOMPUTE), ({"recipe": "rowwise"}, None)],
    ids=["with to without", "without to with", "with to with", "rowwise to without"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_loads_bit_for_bit(ranks, tmp_path, world, saver, loader):
    layout = Layout({"dp_shard": world})
    folder = str(tmp_path / "step-2")
    for written, read in ranks(world, float8_cases.save_and_load, layout, saver, loader, folder):
        assert written.keys() == read.keys()
        assert all(torch.equal(written[name], read[name]) for name in written)


@pytest.mark.parametrize("fields", [{}, GATHER, PRECOMPUTE], ids=["cast", "gather", "precompute"])
def test_a_resumed_run_is_bitwise_the_one_that_went_on(ranks, tmp_path, fields):
    layout = Layout({"dp_shard": 2}, dtype="bfloat16")
    for straight, resumed in ranks(2, float8_cases.resume, layout, fields, str(tmp_path / "step-2")):
        assert straight == resumed


def test_a_load_makes_the_scales_anew(ranks, tmp_path):
    layout = Layout({"dp_shard": 2})
    folder = str(tmp_path / "step-2")
    for straight, reused in ranks(2, float8_cases.load_over, layout, PRECOMPUTE, folder):
        assert straight == reused


def test_initial_values_do_not_depend_on_the_converter(ranks):
    plain = ranks(2, float8_cases.initial_weights, Layout({"dp_shard": 2}), None)[0]
    float8 = ranks(2, float8_cases.initial_weights, Layout({"dp_shard": 2}), GATHER)[0]
    assert plain.keys() == float8.keys()
    assert all(torch.equal(float8[name], plain[name]) for name in plain)


def test_weights_have_their_hugging_face_names_and_values(ranks):
    float8, nothing = ranks(2, float8_cases.hf_weights, Layout({"dp_shard": 2}), GATHER)
    plain, _ = ranks(2, float8_cases.hf_weights, Layout({"dp_shard": 2}), None)
    assert nothing == {}
    assert float8.keys() == plain.keys()
    assert all(torch.equal(float8[name], plain[name]) for name in plain)
    assert {type(tensor) for tensor in float8.values()} == {torch.Tensor}


def test_a_run_may_begin_with_weights_from_a_checkpoint(ranks, tmp_path):
    folder = str(tmp_path / "step-2")
    for written, read in ranks(2, float8_cases.start_from, Layout({"dp_shard": 2}), GATHER, folder):
        assert all(torch.equal(written[name], read[name]) for name in written)
