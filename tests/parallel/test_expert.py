"""Experts spread over ranks: what the table of tests/ranks does not show."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.engine.cases import LENGTH, ROWS, Layout, gradients, my_batches, recipe, whole
from tests.ranks import runs
from tests.ranks.layouts import DEEP, EIGHT, SHARED, TWO
from titancli.checkpoint.hf.lazy_tensor import put
from titancli.engine import Engine
from titancli.models import Qwen3
from titancli.models.blocks.moe import Router
from titancli.recipe.schema import Debug

pytestmark = pytest.mark.ranks


def layout(config: Qwen3 = EIGHT, micro_batches: int = 1, **options: Any) -> Layout:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    mesh = {name: options.pop(name) for name in names if name in options}
    return Layout(mesh=mesh, config=config, micro_batches=micro_batches, **options)


def narrowest_choice(layout: Layout) -> float:
    """By how much the last expert that a token visits in a run leads the first that it does not."""
    leads = []
    kept = Router._choose

    def choose(router: Router, scores: torch.Tensor, expert_bias: torch.Tensor | None) -> torch.Tensor:
        wanted = scores if expert_bias is None else scores + expert_bias
        best = wanted.topk(router.config.top_k + 1, dim=-1).values
        leads.append((best[:, -2] - best[:, -1]).min())
        return kept(router, scores, expert_bias)

    Router._choose = choose  # type: ignore[method-assign]
    try:
        runs.run(layout, "sgd")
    finally:
        Router._choose = kept  # type: ignore[method-assign]
    return float(torch.stack(leads).min())


@pytest.mark.parametrize("config", [EIGHT, DEEP, TWO, SHARED])
def test_no_token_is_torn_between_two_experts(ranks, config):
    """Else rounding could send it elsewhere on another layout, and the comparison would mean nothing."""
    assert ranks(1, narrowest_choice, Layout(config=config))[0] > 1e-6


def forced(layout: Layout) -> tuple[torch.Tensor, list[list[int]]]:
    debug = Debug(moe_force_load_balance=True)
    engine = Engine.build(replace(recipe(layout), debug=debug))
    loss = engine.forward_backward(my_batches(engine))["loss"]
    return loss.clone(), [counts.tolist() for counts in engine.parts[0].token_counts().values()]


def test_forced_balance_is_even_and_the_same_on_every_layout(ranks):
    ((expected, counts),) = ranks(1, forced, Layout(config=EIGHT))
    even = ROWS * LENGTH * 3 // 8
    assert counts == [[even] * 8] * 2
    for loss, mine in ranks(2, forced, layout(dp_shard=2, ep=2)):
        assert mine == [[even // 2] * 8] * 2
        assert loss == pytest.approx(float(expected), rel=1e-6)


def one_step(layout: Layout, crowded: bool = False) -> dict[str, torch.Tensor]:
    """Loss and gradients; `crowded`: every token goes to the first expert."""
    engine = Engine.build(recipe(layout))
    for name, parameter in engine.named_parameters():
        if crowded and name.endswith("router.gate.bias"):
            put(parameter, torch.tensor([9.0, 0.0, 0.0, 0.0]))
    loss = engine.forward_backward(my_batches(engine))["loss"].clone()
    routes = {name: counts.clone() for name, counts in engine.parts[0].token_counts().items()}
    return {"loss": loss, **{name: whole(p.grad) for name, p in engine.named_parameters()}, **routes}


@pytest.mark.parametrize("this", [layout(SHARED, dp_shard=2, ep=2), layout(SHARED, dp_shard=4, ep=4)])
def test_a_rank_that_no_token_comes_to_keeps_step(ranks, this):
    (reference,) = ranks(1, one_step, Layout(config=SHARED), True)
    world = this.mesh["ep"]
    for result in ranks(world, one_step, this, True):
        for layer in ("layers.0.moe", "layers.1.moe"):
            result.pop(layer)
            assert reference[layer].tolist() == [ROWS * LENGTH, 0, 0, 0]
            assert not result[f"{layer}.experts.w1"][1:].any()
        for name, value in result.items():
            assert (value - reference[name]).norm() <= 1e-5 * reference[name].norm().clamp(min=1e-6), name


def test_bfloat16_stays_close_to_float32(ranks):
    (reference,) = ranks(1, one_step, Layout(config=EIGHT))
    for result in ranks(2, one_step, layout(dp_shard=2, ep=2, dtype="bfloat16")):
        assert result["loss"] == pytest.approx(float(reference["loss"]), rel=1e-3)
        for name in ("layers.0.moe.experts.w2", "layers.1.moe.router.gate.weight"):
            # A few tokens, on the border between two experts, go to the other one.
            assert (result[name] - reference[name]).norm() <= 0.2 * reference[name].norm(), name


def compiled_graphs(layout: Layout) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        engine = Engine.build(recipe(layout))
        for step in range(2):
            engine.forward_backward(my_batches(engine, step))
            engine.optim_step()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_blocks_of_experts_share_compiled_code(ranks):
    """Attention, router and experts, whatever the number of blocks: torch gives up at the ninth of a kind."""
    deep = layout(replace(EIGHT, n_layers=10), compile="aot_eager")
    assert ranks(1, compiled_graphs, deep) == [3]


def test_every_token_is_counted_once(ranks):
    (result,) = ranks(1, runs.run, Layout(config=EIGHT), "sgd")
    counts = [value for key, value in result.items() if key.startswith("routes")]
    assert len(counts) == runs.STEPS * 2
    assert all(int(count.sum()) == ROWS * LENGTH * 3 for count in counts)


@pytest.fixture(scope="module")
def on_one_rank(ranks):
    """`on_one_rank(config)`: the gradients of one rank, made once for all layouts."""
    return cache(lambda config: ranks(1, gradients, layout(config))[0])


@pytest.mark.parametrize("coefficient", ["z_loss_coeff", "aux_loss_coeff"])
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, dict(dp_shard=2, ep=2, micro_batches=2)),
        (2, dict(dp_shard=2, micro_batches=1)),
        (2, dict(tp=2)),
        (2, dict(cp=2, activation_checkpoint={"mode": "full"})),
        (2, dict(pp=2, pipeline={"schedule": "1F1B"})),
    ],
)
def test_a_routers_losses_are_the_same_on_every_layout(ranks, on_one_rank, world, options, coefficient):
    config = replace(EIGHT, moe=replace(EIGHT.moe, **{coefficient: 0.1}))
    expected, without = on_one_rank(config), on_one_rank(EIGHT)
    gate = "layers.0.moe.router.gate.weight"
    assert (expected[gate] - without[gate]).norm() > 0.1 * without[gate].norm()
    found = {k: v for part in ranks(world, gradients, layout(config, **options)) for k, v in part.items()}
    for name, reference in expected.items():
        if name != "loss_max":
            assert (found[name] - reference).norm() <= 1e-5 * reference.norm(), name


def _after_a_layer_raised(case: Layout) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of a call after one that raised while tokens were counted, and those of an engine apart."""
    engine = Engine.build(recipe(case))
    hook = engine.model.layers["1"].register_forward_pre_hook(_raise)
    with pytest.raises(ValueError, match="on purpose"):
        engine.forward_backward(my_batches(engine))
    hook.remove()
    engine.forward_backward(my_batches(engine))
    found = {name: whole(p.grad / engine.pending.weight) for name, p in engine.named_parameters()}
    return found, gradients(case)


def _raise(*_: Any) -> None:
    raise ValueError("on purpose")


def test_counting_that_raises_leaves_nothing_behind(ranks):
    case = layout(replace(EIGHT, moe=replace(EIGHT.moe, aux_loss_coeff=0.1)), dp_shard=2, micro_batches=2)
    for found, expected in ranks(2, _after_a_layer_raised, case):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
