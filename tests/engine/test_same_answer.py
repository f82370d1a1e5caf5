"""The same weights and data give the same loss, gradients and weights on every layout."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.engine import cases
from tests.engine.cases import Layout
from titancli.losses import CrossEntropyFull

pytestmark = pytest.mark.ranks

ONE = Layout()
LAYOUTS = {
    "fsdp-2": (2, Layout({"dp_shard": 2})),
    "ddp-2": (2, Layout({"dp_replicate": 2, "dp_shard": 1})),
    "hsdp-2x2": (4, Layout({"dp_replicate": 2, "dp_shard": 2})),
    "fsdp-4": (4, Layout({"dp_shard": 4})),
    "micro-batches": (1, Layout(micro_batches=4)),
    "fsdp-2 sharded accumulation": (2, Layout({"dp_shard": 2}, micro_batches=2)),
    "fsdp-2 unsharded accumulation": (2, Layout({"dp_shard": 2}, micro_batches=2, accumulate="unsharded")),
    "hsdp-2x2 sharded accumulation": (4, Layout({"dp_replicate": 2, "dp_shard": 2}, micro_batches=2)),
    "hsdp-2x2 unsharded accumulation": (
        4, Layout({"dp_replicate": 2, "dp_shard": 2}, micro_batches=2, accumulate="unsharded"),
    ),
    "always reshard": (2, Layout({"dp_shard": 2}, reshard="always")),
    "never reshard": (2, Layout({"dp_shard": 2}, reshard="never")),
    "full checkpointing": (2, Layout({"dp_shard": 2}, activation_checkpoint={"mode": "full"})),
    "selective by op": (
        2, Layout({"dp_shard": 2}, activation_checkpoint={"mode": "selective", "selective_ac_option": "op"}),
    ),
    "every second layer": (
        2, Layout({"dp_shard": 2}, activation_checkpoint={"mode": "selective", "selective_ac_option": "2"}),
    ),
    "full logits": (2, Layout({"dp_shard": 2}, loss=CrossEntropyFull())),
    "compiled": (2, Layout({"dp_shard": 2}, compile="aot_eager")),
    "compiled and checkpointed": (
        2, Layout({"dp_shard": 2}, compile="aot_eager", activation_checkpoint={"mode": "selective"}),
    ),
}  # fmt: skip


def assert_same(result, reference, tolerance=1e-5):
    assert result.keys() == reference.keys()
    for name, expected in reference.items():
        error = (result[name] - expected).norm() / expected.norm().clamp(min=1e-12)
        assert error <= tolerance, f"{name}: off by {error:.2e}"


@pytest.fixture(scope="module")
def one_rank(ranks):
    return {
        tied: {
            "gradients": ranks(1, cases.gradients, Layout(tied=tied))[0],
            "training": ranks(1, cases.training, Layout(tied=tied))[0],
        }
        for tied in (False, True)
    }


def test_gradients_on_one_rank_are_those_of_a_plain_loop(ranks, one_rank):
    weights = ranks(1, cases.initial_weights, ONE)[0]
    from titancli.models import Llama3
    from titancli.models.llama3 import build

    model = build(Llama3(**cases.MODEL), seq_len=cases.LENGTH)
    model.load_state_dict(weights)
    batch = cases.whole_batch()
    loss = cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}
    result = {k: v for k, v in one_rank[False]["gradients"].items() if k != "loss_max"}
    assert_same(result, expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_one_rank(ranks, one_rank, name):
    world, layout = LAYOUTS[name]
    reference = one_rank[False]["gradients"]
    for result in ranks(world, cases.gradients, layout):
        assert result.pop("loss_max") >= reference["loss"] - 1e-5
        assert_same(result, {k: v for k, v in reference.items() if k != "loss_max"})


@pytest.mark.parametrize("name", ["fsdp-2", "ddp-2", "hsdp-2x2", "fsdp-2 unsharded accumulation", "compiled"])
def test_weights_after_training_equal_one_rank(ranks, one_rank, name):
    world, layout = LAYOUTS[name]
    assert_same(ranks(world, cases.training, layout)[0], one_rank[False]["training"])


def test_tied_weights_train_as_one(ranks, one_rank):
    from dataclasses import replace

    reference = one_rank[True]
    assert "output.weight" not in reference["gradients"]
    layout = replace(LAYOUTS["fsdp-2"][1], tied=True)
    result = ranks(2, cases.gradients, layout)[0]
    assert_same(
        {k: v for k, v in result.items() if k != "loss_max"},
        {k: v for k, v in reference["gradients"].items() if k != "loss_max"},
    )
    assert_same(ranks(2, cases.training, layout)[0], reference["training"])


def test_initial_values_do_not_depend_on_the_layout(ranks):
    reference = ranks(1, cases.initial_weights, ONE)[0]
    for name in ("fsdp-2", "hsdp-2x2"):
        world, layout = LAYOUTS[name]
        for result in ranks(world, cases.initial_weights, layout):
            for key, value in reference.items():
                assert torch.equal(result[key], value), key


def test_bfloat16_gradients_stay_close_to_float32(ranks, one_rank):
    layout = Layout({"dp_shard": 2}, dtype="bfloat16")
    reference = {k: v for k, v in one_rank[False]["gradients"].items() if k != "loss_max"}
    result = ranks(2, cases.gradients, layout)[0]
    result.pop("loss_max")
    assert_same(result, reference, tolerance=0.05)
