"""Router replay: tokens visit in training the experts that they visited when they were sampled."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from tests.engine.cases import Layout, recipe, small, whole_batch, wholes
from tests.engine.flips import flipped
from tests.ranks import Ranks
from tests.ranks.layouts import BY_OP, EIGHT, FULL_AC, FURTHER, GPT_OSS, IROPE, LATENT
from titan_proof import Recheck
from titan_rl import Grpo
from titancli import Engine, Sample, SamplingParams, TitanError
from titancli.models.blocks.moe import MoE, moe_layers, recorded
from titancli.models.blocks.router import Router
from titancli.registry.component import build

pytestmark = pytest.mark.ranks

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [35], [8, 9, 7, 9]]
PARAMS = SamplingParams(max_tokens=10, seed=3, routes=True)


def engine_of(layout: Layout, **training: Any) -> Engine:
    """An engine whose experts matter: with initial weights they add next to nothing."""
    engine = Engine.build(recipe(layout, **training))
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            if name.startswith("layers.") and parameter.ndim > 1:
                parameter.mul_(6)
    return engine


def without(samples: Sequence[Sample]) -> list[Sample]:
    return [dataclasses.replace(sample, routes=None) for sample in samples]


# ---------------------------------------------------------------------------------- trainer beside sampler


def far(found: Sequence[Tensor], samples: Sequence[Sample]) -> float:
    """How far log-probabilities are from the sampler's."""
    return max(
        float((one - torch.tensor(sample.logprobs)).abs().max())
        for one, sample in zip(found, samples, strict=True)
    )


def beside_the_sampler(layout: Layout) -> dict[str, float]:
    flips: list[int] = []
    with engine_of(layout) as engine:
        prompts = PROMPTS[engine.dp_rank :: engine.dp_size]
        with flipped(0.1, flips):
            made = engine.sample(prompts, 4, PARAMS)
        samples = [Sample.of(p, one, 1.0) for p, row in zip(prompts, made, strict=True) for one in row]
        how: dict[str, Any] = {"shared": False}
        found = engine.forward_backward(samples, "grpo", **how)
        return {
            "flips": sum(flips[::2]) / sum(flips[1::2]),
            "with": far(engine.forward(samples, **how), samples),
            "in training": far(found.logprobs, samples),
            "ratio": abs(float(found.metrics["ratio"]) - 1),
            "without": far(engine.forward(without(samples), **how), samples),
        }


AGREE = {
    "alone": (1, EIGHT, {}),
    "FSDP2": (2, EIGHT, {"dp_shard": 2}),
    "EP2": (2, EIGHT, {"dp_shard": 2, "ep": 2}),
    "TP2": (2, EIGHT, {"tp": 2}),
    "CP2": (2, EIGHT, {"cp": 2}),
    "groups and biases, alone": (1, LATENT, {}),
    "groups and biases, EP2 of TP2": (2, LATENT, {"tp": 2, "ep": 2}),
    "clamped": (1, GPT_OSS, {}),
    "one expert a token": (1, IROPE, {}),
}


@pytest.mark.parametrize("name", AGREE)
def test_log_probabilities_are_the_samplers_with_a_tenth_of_its_routes_flipped(
    ranks: Ranks, name: str
) -> None:
    count, config, mesh = AGREE[name]
    for found in ranks(count, beside_the_sampler, Layout(mesh, config=config)):
        assert 0.05 < found["flips"] < 0.15
        assert found["with"] <= 1e-5 and found["in training"] <= 1e-5 and found["ratio"] <= 1e-5, found
        assert found["without"] > 0.01, found  # a thousand times as far


# ------------------------------------------------------------------------- gradients beside dense arithmetic


def samples_of(config: Any, *, holes: bool = True) -> list[Sample]:
    """Samples with routes that no router has chosen: some tokens have none."""
    drawn = torch.Generator().manual_seed(1)
    moe = config.moe
    layers = sum(hasattr(block.feed_forward, "routing") and not block.mtp for block in config.shape().blocks)
    found = []
    for number, length in enumerate((5, 16, 2, 9, 12, 17, 3, 7)):
        tokens = torch.randint(0, 64, (length,), generator=drawn)
        noise = torch.rand(length, layers, moe.num_experts, generator=drawn)
        routes = noise.argsort(-1)[..., : moe.top_k]
        if holes:
            routes[torch.rand(length, layers, generator=drawn) < 0.2] = -1
            routes = routes[: length - number]  # what comes after them was appended later
        mask = [0.0] * (length // 3) + [1.0] * (length - length // 3)
        kind = (np.int16, np.int64, np.int8)[number % 3]
        found.append(Sample(tokens.tolist(), mask, [-4.0] * length, 1.0, routes=routes.numpy().astype(kind)))
    return found


def dense(layer: MoE, routes: Tensor, x: Tensor) -> Tensor:
    """Every expert for every token, times its gate, which is 0 where a token does not visit it."""
    config, tokens, gate = layer.config, x.flatten(0, -2), layer.router.gate
    logits = linear(tokens, gate.weight, gate.bias)
    scores = logits.softmax(-1) if config.score_func == "softmax" else logits.sigmoid()
    own = layer.router._choose(scores.detach(), layer.expert_bias)
    visited = torch.where(routes < 0, own, routes)
    gates = torch.zeros_like(scores).scatter(1, visited, scores.gather(1, visited))
    if config.route_norm:
        gates = gates / gates.sum(-1, keepdim=True)
    out = torch.zeros_like(tokens)
    for expert in range(config.num_experts):
        counts = torch.zeros(config.num_experts, dtype=torch.int64)
        counts[expert] = len(tokens)
        weight = config.route_scale * gates[:, expert, None]
        if config.score_before_experts:
            out = out + layer.experts.over_experts(tokens * weight, counts)
        else:
            out = out + layer.experts.over_experts(tokens, counts) * weight
    if layer.shared_experts is not None:
        out = out + layer.shared_experts(tokens)
    return out.view_as(x)


def by_arithmetic(config: Any) -> dict[str, Tensor]:
    """Gradients of −Σ log p, one sample after the other."""
    with engine_of(Layout(config=config)) as engine:
        model: nn.Module = engine.model
        named, total = dict(model.named_parameters()), torch.zeros(())
        for sample in samples_of(config):
            given = torch.tensor(sample.routes.astype(np.int64))
            for column, layer in enumerate(list(moe_layers(model).values())):
                routes = torch.full((len(sample.tokens) - 1, config.moe.top_k), -1)
                own = given[: len(routes), column]
                routes[: len(own)] = own
                layer.forward = partial(dense, layer, routes)
            tokens, mask = torch.tensor(sample.tokens), torch.tensor(sample.mask)
            logits = model(tokens[None, :-1])[0].log_softmax(-1)
            total = total - (logits.gather(1, tokens[1:, None])[:, 0] * mask[1:]).sum()
        slopes = torch.autograd.grad(total, named.values())
        return dict(zip(named, slopes, strict=True))


def by_replay(layout: Layout) -> dict[str, Tensor]:
    with engine_of(layout) as engine:
        engine.forward_backward(samples_of(layout.config), "sft")
        return wholes((name, p.grad) for name, p in engine.named_parameters())


GRADIENTS = {
    "alone": (1, EIGHT, {}, {}),
    "FSDP2": (2, EIGHT, {"dp_shard": 2}, {}),
    "EP2": (2, EIGHT, {"dp_shard": 2, "ep": 2}, {}),
    "TP2": (2, EIGHT, {"tp": 2}, {}),
    "CP2": (2, EIGHT, {"cp": 2}, {}),
    "PP2": (2, EIGHT, {"pp": 2}, {}),
    "EP2, AC full": (2, EIGHT, {"dp_shard": 2, "ep": 2}, {"activation_checkpoint": FULL_AC}),
    "EP2, AC by op": (2, EIGHT, {"dp_shard": 2, "ep": 2}, {"activation_checkpoint": BY_OP}),
    "FSDP2, compiled": (2, EIGHT, {"dp_shard": 2}, {"compile": "aot_eager"}),
    "PP2, AC by op": (2, LATENT, {"pp": 2}, {"activation_checkpoint": BY_OP}),
    "groups and biases, FSDP2": (2, LATENT, {"dp_shard": 2}, {}),
    "groups and biases, EP2 of CP2xTP2": (4, LATENT, {"cp": 2, "tp": 2, "ep": 2}, {}),
    "clamped, EP2xTP2": (4, GPT_OSS, {"dp_shard": 2, "tp": 2, "ep": 2}, {}),
    "one expert a token, TP2": (2, IROPE, {"tp": 2}, {}),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_dense_experts_with_fixed_routes(ranks: Ranks, name: str) -> None:
    count, config, mesh, more = GRADIENTS[name]
    (expected,) = ranks(1, by_arithmetic, config)
    seen = set()
    for found in ranks(count, by_replay, Layout(mesh, config=config, **more)):
        seen |= found.keys()
        for key, value in found.items():
            assert (value - expected[key]).norm() <= 1e-5 * expected[key].norm() + 1e-6, key
    assert seen == expected.keys()


# ------------------------------------------------------------------------------------------- what is counted


def counted() -> None:
    """Counts for balancing, and twice the same (recheck), of rows that are given as a batch."""
    with engine_of(Layout(config=LATENT)) as engine:
        batch, routing = whole_batch(), engine.model.routing
        shape = (*batch["tokens"].shape, routing.layers, routing.num_experts)
        routes = torch.rand(shape).argsort(-1)[..., : routing.top_k]
        engine.forward_backward({**batch, "routes": routes.to(torch.uint8)})
        for column, layer in enumerate(moe_layers(engine.model).values()):
            visits = routes[:, :, column].flatten().bincount(minlength=routing.num_experts)
            assert torch.equal(layer.token_counts(), visits)
        before = {name: layer.expert_bias.clone() for name, layer in moe_layers(engine.model).items()}
        loads = {name: layer.token_counts().float() for name, layer in moe_layers(engine.model).items()}
        engine.optim_step()
        for name, layer in moe_layers(engine.model).items():
            moved = (layer.expert_bias - before[name]).sign()
            assert torch.equal(moved, (loads[name].mean() - loads[name]).sign())


def test_counts_for_balancing_are_of_the_routes_that_are_used(ranks: Ranks) -> None:
    ranks(1, counted)


def test_a_router_scores_the_experts_that_it_is_given() -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(EIGHT.moe, aux_loss_coeff=0.1, z_loss_coeff=0.1)
    router, x = Router(16, config), torch.randn(6, 16)
    own = router(x, None)
    given = own.experts.clone()
    given[2] = torch.tensor([own.experts[2, 0], 0, 1]) if own.experts[2, 0] > 1 else torch.tensor([5, 6, 7])
    given[3] = -1
    found = router(x, None, given.to(torch.int16))
    assert torch.equal(found.experts[[0, 1, 3, 4, 5]], own.experts[[0, 1, 3, 4, 5]])
    assert torch.equal(found.experts[2], given[2]) and torch.equal(found.probabilities, own.probabilities)
    chosen = found.probabilities[2, given[2]]
    torch.testing.assert_close(found.scores[2], chosen / chosen.sum())
    assert torch.equal(found.counts, found.experts.flatten().bincount(minlength=8))


def computed_twice() -> None:
    layout = Layout({"dp_shard": 2, "ep": 2}, config=EIGHT, activation_checkpoint=FULL_AC)
    with engine_of(layout) as engine, engine_of(layout) as other:
        engine.hooks.add(build(Recheck(every=1), engine=engine, run=None))
        for own in (engine, other):
            own.forward_backward(samples_of(EIGHT), "grpo")
            own.optim_step()
        assert engine.step == 1


def test_a_step_that_is_computed_twice_has_the_same_routes(ranks: Ranks) -> None:
    ranks(2, computed_twice)


# ------------------------------------------------------------------------------------------------ recordings


def recordings() -> None:
    with engine_of(Layout(config=FURTHER), seq_len=32) as engine:
        layers = FURTHER.n_layers - FURTHER.n_dense_layers
        made = engine.sample(PROMPTS, 3, PARAMS)
        small_batches = engine.sample(PROMPTS, 3, PARAMS, batch_size=2)
        for prompt, row, again in zip(PROMPTS, made, small_batches, strict=True):
            for one, other in zip(row, again, strict=True):
                length = len(prompt) + len(one.tokens) - 1
                assert (
                    one.routes.shape == (length, layers, FURTHER.moe.top_k) and one.routes.dtype == np.uint8
                )
                assert np.array_equal(one.routes, other.routes), "whatever else is in the batch"
                with torch.no_grad(), recorded(engine.model) as taken:
                    engine.model(torch.tensor([[*prompt, *one.tokens[:-1]]]))
                    assert np.array_equal(taken().numpy(), one.routes), "prompt and completion"
        plain = engine.sample(PROMPTS, 3, dataclasses.replace(PARAMS, routes=False))
        assert plain == made and plain[0][0].routes is None
        assert not any(layer.router._forward_hooks for layer in moe_layers(engine.model).values())


def test_prompts_and_completions_are_recorded_whatever_else_is_sampled(ranks: Ranks) -> None:
    """Without the blocks of multi-token prediction, through which no sample goes."""
    ranks(1, recordings)


def two_at_once() -> None:
    """One samples in the middle of the other, and what raises in the middle leaves nothing behind."""
    other_layout = Layout(config=dataclasses.replace(EIGHT, n_layers=3))
    with engine_of(Layout(config=EIGHT), seq_len=32) as one, engine_of(other_layout, seq_len=32) as other:
        alone = [engine.sample(PROMPTS, 2, PARAMS) for engine in (one, other)]
        with one.sampling() as model, recorded(model) as taken:
            found = other.sample(PROMPTS, 2, PARAMS)
            model(torch.tensor([[1, 2, 3]]))
            assert taken().shape == (3, 2, 3)
        for row, same in zip(alone[1], found, strict=True):
            for a, b in zip(row, same, strict=True):
                assert a.tokens == b.tokens and np.array_equal(a.routes, b.routes)
        samples = [Sample.of(p, c, 1.0) for p, row in zip(PROMPTS, alone[0], strict=True) for c in row]
        assert far(one.forward(samples), samples) <= 1e-5
        with pytest.raises(
            TitanError, match=r"sample 0: its routes are \[\d+, 2, 3\], but must be \[\d+, 3, 3\]"
        ):
            other.forward(samples)

        def fails(*_: Any) -> None:
            raise ValueError("in the middle")

        hook = one.model.norm.register_forward_hook(fails)
        with pytest.raises(ValueError, match="in the middle"):
            one.sample(PROMPTS, 2, PARAMS)
        hook.remove()
        assert not any(layer.router._forward_hooks for layer in moe_layers(one.model).values())
        assert one.sample(PROMPTS, 2, PARAMS) == alone[0]


def test_two_engines_at_once_and_one_that_raises_in_the_middle(ranks: Ranks) -> None:
    ranks(1, two_at_once)


# ------------------------------------------------------------------------------------------------- bad input

GOOD = samples_of(EIGHT)[0]
HERE = np.array(GOOD.routes)


def routes(**changes: Any) -> np.ndarray[Any, Any]:
    """Good ones, but for the entry at [1, 1]."""
    found = HERE.astype(np.int64)
    found[1, 1] = changes["entry"]
    return found


WRONG: list[tuple[Any, str]] = [
    (HERE[:, :1], r"its routes are \[5, 1, 3\], but must be \[5, 2, 3\]: the model has 2 layers of experts"),
    (HERE[:, :, :2], r"its routes are \[5, 2, 2\].* a token visits 3 in each"),
    (HERE[:, 0], r"its routes are \[5, 3\], but must be"),
    ([], r"its routes are torch.float64, but must be integers"),
    (HERE.astype(np.float32), "its routes are torch.float32, but must be integers"),
    (np.concatenate((HERE, HERE)), "its routes are of 10 tokens, but it has 5"),
    (routes(entry=[1, 8, 2]), r"its routes have the expert 8 at \[1, 1, 1\], but the model has 0 to 7"),
    (routes(entry=[1, -2, 2]), r"its routes have the expert -2 at \[1, 1, 1\]"),
    (routes(entry=[1, 70000, 2]), "its routes have the expert 70000"),
    (routes(entry=[1, 2**32 + 3, 2]), "its routes have the expert 4294967299"),
    (routes(entry=[1, 4, 1]), r"its routes at \[1, 1\] are \[1, 4, 1\], which are not 3 different experts"),
    (routes(entry=[1, -1, 2]), r"its routes at \[1, 1\] are \[1, -1, 2\], which are not 3 different"),
    ([[1, 2], [3]], "its routes must be a list of experts"),
    ("abc", "its routes must be a list of experts"),
    (None, "sample 0 has routes, but sample 1 has not"),
]


def wrong_on_one_rank(layout: Layout, cases: Sequence[Any], shared: bool) -> list[str]:
    found = []
    with engine_of(layout) as engine:
        engine.forward_backward([GOOD] * 3, "sft")
        before = [p.grad.clone() for _, p in engine.named_parameters()]
        for given in cases:
            bad = [GOOD, dataclasses.replace(GOOD, routes=given), GOOD]
            for verb in (engine.forward, lambda *a, **how: engine.forward_backward(*a, "sft", **how)):
                try:
                    verb(bad if shared or dist.get_rank() else [GOOD] * 3, shared=shared)
                    found.append("no error")
                except TitanError as error:
                    found.append(str(error))
        for old, (_, p) in zip(before, engine.named_parameters(), strict=True):
            assert torch.equal(wholes([("", old)])[""], wholes([("", p.grad)])[""])
        engine.optim_step()  # and goes on
    return found


@pytest.mark.parametrize("shared", [True, False], ids=["all ranks", "one rank"])
def test_what_is_wrong_is_told_on_every_rank_and_nothing_has_happened(ranks: Ranks, shared: bool) -> None:
    layout = Layout({"dp_shard": 2, "ep": 2}, config=EIGHT)
    for told in ranks(2, wrong_on_one_rank, layout, [given for given, _ in WRONG], shared):
        for number, (_, words) in enumerate(WRONG):
            for one in told[2 * number : 2 * number + 2]:
                assert re.search(words, one), (words, one)


def ranks_differ() -> str:
    """Shared samples whose routes alone differ."""
    with engine_of(Layout({"dp_shard": 2}, config=EIGHT)) as engine:
        other = dataclasses.replace(GOOD, routes=HERE[::-1] if dist.get_rank() else HERE)
        try:
            engine.forward([other])
        except TitanError as error:
            return str(error)
    return "no error"


def test_ranks_whose_routes_differ_hear_of_it(ranks: Ranks) -> None:
    for told in ranks(2, ranks_differ):
        assert "samples of checksum" in told


def dense_model() -> None:
    plain = Sample([1, 2, 3], [0, 1, 1])
    with Engine.build(recipe(small())) as engine:
        with pytest.raises(
            TitanError, match="sample 0: its routes cannot be replayed: the model has no layers"
        ):
            engine.forward([dataclasses.replace(plain, routes=[[[1]], [[2]]])])
        with pytest.raises(TitanError, match="Decoder has no routes to record"):
            engine.sample([[1]], 1, PARAMS)
        with pytest.raises(TitanError, match="the batch's routes cannot be replayed"):
            engine.forward_backward({**whole_batch(), "routes": torch.zeros(8, 16, 1, 1).int()})
        assert engine.forward([plain])[0].shape == (3,)
    with pytest.raises(TitanError, match="sampling: routes is 1"):
        SamplingParams(routes=1)


def test_a_model_without_experts_is_refused_by_name(ranks: Ranks) -> None:
    ranks(1, dense_model)


def nothing() -> None:
    """No completion, or one of no tokens; a rank without samples, and a sample without targets or record."""
    with engine_of(Layout({"dp_shard": 2, "ep": 2}, config=EIGHT)) as engine:
        assert engine.sample([], 2, PARAMS) == []
        mine = [GOOD] if dist.get_rank() else []
        found = engine.forward_backward(mine, Grpo(), shared=False)
        assert len(found.logprobs) == len(mine)
        prompt_alone = Sample([1, 2], [0, 0], [0.0, 0.0], routes=HERE[:1])
        unrecorded = dataclasses.replace(GOOD, routes=HERE[:0])
        empty = [prompt_alone, GOOD, unrecorded]
        logprobs = engine.forward(empty)
        assert not logprobs[0].any()
        # not bit for bit: with kernels of AVX2 a row's bits depend on the rows beside it
        torch.testing.assert_close(logprobs[2], engine.forward(without([GOOD]))[0])
        assert not torch.allclose(logprobs[1], logprobs[2])
        engine.forward_backward([prompt_alone] * 2, Grpo())
        engine.optim_step()


def test_what_is_empty_is_no_error(ranks: Ranks) -> None:
    ranks(2, nothing)
