"""Experts spread over ranks give the answer of one rank: losses, gradients, weights, routes and biases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.cases import LENGTH, ROWS, VOCABULARY, Layout, my_batches, recipe, whole
from tests.ranks import runs
from tests.ranks.comparison import difference
from titancli.checkpoint.hf import put
from titancli.engine import Engine
from titancli.models import Qwen3
from titancli.models.blocks.decoder import Decoder
from titancli.models.blocks.moe import Router, moe_layers
from titancli.models.menu.moe import MoE
from titancli.recipe.schema import Debug

pytestmark = pytest.mark.ranks

SIZES: dict[str, Any] = dict(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=VOCABULARY, rope_theta=10000.0
)
ROUTING: dict[str, Any] = dict(score_func="softmax", route_norm=True, score_before_experts=False)
EIGHT = Qwen3(**SIZES, moe=MoE(num_experts=8, top_k=3, hidden_dim=16, load_balance_coeff=1e-2, **ROUTING))
DEEP = replace(EIGHT, n_layers=4)
TWO = Qwen3(**SIZES, moe=MoE(num_experts=2, top_k=1, hidden_dim=16, score_func="softmax"))
SHARED = Qwen3(**SIZES, moe=MoE(num_experts=4, top_k=1, hidden_dim=16, num_shared_experts=1, gate_bias=True))


def layout(config: Qwen3 = EIGHT, micro_batches: int = 1, **options: Any) -> Layout:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    mesh = {name: options.pop(name) for name in names if name in options}
    return Layout(mesh=mesh, config=config, micro_batches=micro_batches, **options)


ZBV = {"schedule": "ZBVZeroBubble"}
FULL = {"mode": "full"}
BY_OP = {"mode": "selective", "selective_ac_option": "op"}
LAYOUTS = {
    "FSDP2": (2, layout(dp_shard=2)),
    "EP2": (2, layout(dp_shard=2, ep=2)),
    "EP2, accumulation": (2, layout(dp_shard=2, ep=2, micro_batches=2)),
    "EP2, accumulation unsharded": (2, layout(dp_shard=2, ep=2, micro_batches=2, accumulate="unsharded")),
    "EP4": (4, layout(dp_shard=4, ep=4)),
    "EP2xFSDP2": (4, layout(dp_shard=4, ep=2)),
    "EP2xDDP2": (4, layout(dp_replicate=2, dp_shard=2, ep=2)),
    "TP2": (2, layout(tp=2)),
    "EP2 of TP2": (2, layout(tp=2, ep=2)),
    "EP2xTP2": (4, layout(dp_shard=2, tp=2, ep=2)),
    "EP2 of CP2xTP2": (4, layout(cp=2, tp=2, ep=2, context_parallel="ring")),
    "EP2 of FSDP2xCP2": (4, layout(dp_shard=2, cp=2, ep=2, context_parallel="ulysses")),
    "EP4 of FSDP2xTP2": (4, layout(dp_shard=2, tp=2, ep=4)),
    "EP2 of CP2": (2, layout(cp=2, ep=2)),
    "FSDP4, two experts a rank": (4, layout(dp_shard=4)),
    "EP2xFSDP2, hidden cut": (4, layout(TWO, dp_shard=4, ep=2)),
    "shared, EP2xTP2": (4, layout(SHARED, dp_shard=2, tp=2, ep=2)),
    "PP2xEP2": (4, layout(DEEP, pp=2, dp_shard=2, ep=2)),
    "PP2xEP2, backward in two": (4, layout(DEEP, pp=2, dp_shard=2, ep=2, pipeline=ZBV)),
    "EP2, AC full": (2, layout(dp_shard=2, ep=2, activation_checkpoint=FULL)),
    "EP2, AC by op": (2, layout(dp_shard=2, ep=2, activation_checkpoint=BY_OP)),
    "EP2, compiled": (2, layout(dp_shard=2, ep=2, compile="aot_eager")),
    "EP2, compiled, AC by op": (
        2, layout(dp_shard=2, ep=2, compile="aot_eager", activation_checkpoint=BY_OP)
    ),
    "EP2xTP2, compiled, AC full": (
        4, layout(dp_shard=2, tp=2, ep=2, compile="aot_eager", activation_checkpoint=FULL)
    ),
    "shared, EP2xTP2, compiled, AC by op": (
        4, layout(SHARED, dp_shard=2, tp=2, ep=2, compile="aot_eager", activation_checkpoint=BY_OP)
    ),
}  # fmt: skip


def run(layout: Layout, optimizer: str) -> dict[str, torch.Tensor]:
    """The suite's run, with the biases after each step and how many tokens each expert had in it."""
    seen: dict[str, torch.Tensor] = {}
    steps: Counter[str] = Counter()
    kept = Decoder.after_step

    def watched(model: Decoder, counts: Mapping[str, torch.Tensor]) -> None:
        kept(model, counts)
        for name, layer in moe_layers(model).items():
            step = steps[name]
            steps[name] += 1
            seen[f"routes {step} {name}"] = counts[name].float()
            if layer.expert_bias is not None:
                seen[f"weight {step} {name}.expert_bias"] = layer.expert_bias.clone()

    Decoder.after_step = watched  # type: ignore[method-assign]
    try:
        return runs.run(layout, optimizer) | seen
    finally:
        Decoder.after_step = kept  # type: ignore[method-assign]


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


@pytest.fixture(scope="module")
def one_rank(ranks):
    known: dict[str, dict[str, torch.Tensor]] = {}

    def reference(config: Qwen3) -> dict[str, torch.Tensor]:
        if str(config) not in known:
            known[str(config)] = ranks(1, run, Layout(config=config), "sgd")[0]
        return known[str(config)]

    return reference


SLOW = {"EP2xTP2, compiled, AC full", "EP2, compiled"}
"""Minutes where cores are few, and each has a sister that is not."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS]
)
def test_every_layout_gives_the_answer_of_one_rank(ranks, one_rank, name):
    world, this = LAYOUTS[name]
    reference = one_rank(this.config)
    results = ranks(world, run, this, "sgd")
    for result in results:  # of its own stages, under a pipeline
        for key in [key for key in result if key.startswith("routes")]:
            assert torch.equal(result.pop(key), reference[key]), f"{key}: tokens went elsewhere"
    found = difference(results, {k: v for k, v in reference.items() if not k.startswith("routes")})
    assert found.largest <= 1e-5, f"{found.worst}: {found}"


@pytest.mark.parametrize("config", {id(case.config): case.config for _, case in LAYOUTS.values()}.values())
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


def test_every_token_is_counted_once(one_rank):
    counts = [value for key, value in one_rank(EIGHT).items() if key.startswith("routes")]
    assert len(counts) == runs.STEPS * 2
    assert all(int(count.sum()) == ROWS * LENGTH * 3 for count in counts)
