"""The losses of routers, balancing and z, are averages over the tokens of a step: their coefficients mean the
same under every loss, on every layout and for any number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.cases import LENGTH, ROWS, Layout, recipe, whole_batch, wholes
from tests.ranks import Ranks
from tests.ranks.layouts import EIGHT, FURTHER, LATENT, SHARED
from titan_preference import DPO
from titan_rl import Grpo, ImportanceSampling
from titancli.engine import Engine
from titancli.engine.replicas import reduce_gradients
from titancli.errors import RankFailure, TitanError
from titancli.losses import SFT, CrossEntropy, CrossEntropyFull
from titancli.models import Qwen3
from titancli.models.blocks.decoder import Decoder, build
from titancli.models.blocks.moe import moe_layers
from titancli.observe.metrics import collector, report
from titancli.protocols.batch import IGNORE, Batch
from titancli.registry.component import component

pytestmark = pytest.mark.ranks
COEFFICIENTS = {"aux_loss_coeff": 0.1, "z_loss_coeff": 0.03}
BOTH = replace(EIGHT, moe=replace(EIGHT.moe, **COEFFICIENTS))
LOSSES: dict[str, Any] = {
    "cross_entropy": CrossEntropy(),
    "full logits": CrossEntropyFull(),
    "sft, sparse": SFT(),
    "dpo": DPO(),
    "grpo": Grpo(),
    "dr. grpo": Grpo(length_norm="constant", constant=9),
    "importance sampling": ImportanceSampling(),
}
PAIRS: dict[str, Any] = {"pipeline": {"microbatch_size": 2}}
WITHOUT_EXPERTS_FIRST = replace(LATENT, n_dense_layers=2)


def layout_of(config: Any, **options: Any) -> Layout:
    """Degrees by their own names (`tp=2`), everything else as in `Layout`."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    mesh = {name: options.pop(name) for name in names if name in options}
    return Layout(mesh=mesh, config=config, **options)


def data(name: str = "") -> Batch:
    """The rows of a step; of the sparse case few of them have a target."""
    batch = whole_batch()
    generator = torch.Generator().manual_seed(5)
    near = -4.2 + 0.4 * torch.randn(ROWS, LENGTH, generator=generator)
    targets = batch["targets"].clone()
    if "sparse" in name:
        targets[:, :-1] = IGNORE
        targets[: ROWS // 2] = IGNORE  # all of them on one of two ranks
    more = {
        "targets": targets,
        "old_logprobs": near,
        "advantages": torch.randn(ROWS, LENGTH, generator=generator),
        "reference_row_logprobs": near.sum(1),
    }
    return Batch({**batch, **more}, unit=2)


def mine(engine: Engine, batch: Batch) -> list[Batch]:
    dp, count = engine.mesh.degrees.dp, engine.settings.accumulation
    pieces = batch.split(ROWS // dp // count)
    return [pieces[number * dp + engine.mesh.dp_rank] for number in range(count)]


def divided(engine: Engine) -> dict[str, Tensor]:
    assert engine.pending is not None
    weight = engine.pending.weight
    return wholes((name, p.grad / weight) for name, p in engine.named_parameters() if p.grad is not None)


def gradients(layout: Layout, losses: tuple[str, ...] = tuple(LOSSES)) -> dict[str, dict[str, Tensor]]:
    """By loss, what the optimizer would step with."""
    found = {}
    with Engine.build(recipe(layout)) as engine:
        for name in losses:
            engine.forward_backward(mine(engine, data(name)), LOSSES[name])
            found[name] = divided(engine)
            engine.clear_gradients()
    return found


def attention_mask(targets: Tensor) -> Tensor:
    """Row by row, 1 up to the last target, as a collator of transformers would say it; 0 for its padding."""
    found = torch.zeros_like(targets)
    for row, own in zip(found, targets.tolist(), strict=True):
        row[: 1 + max((place for place, target in enumerate(own) if target >= 0), default=-1)] = 1
    return found


def own_losses(model: Any, found: list[Tensor], mask: Tensor) -> list[Any]:
    """Hooks by which the model's next forward adds to `found` the losses of its routers: transformers'
    function on the logits of each layer, and ST-MoE's equation 5, both means over all tokens but padding."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    def add(gate: Any, given: Any, logits: Tensor) -> None:
        balancing = load_balancing_loss_func((logits,), EIGHT.moe.num_experts, EIGHT.moe.top_k, mask)
        z_loss = (logits.logsumexp(-1).square() * mask.flatten()).sum() / mask.sum()
        found.append(COEFFICIENTS["aux_loss_coeff"] * balancing + COEFFICIENTS["z_loss_coeff"] * z_loss)

    gates = [layer.router.gate for layer in moe_layers(model).values()]
    return [gate.register_forward_hook(add) for gate in gates]


def by_definition(name: str) -> dict[str, Tensor]:
    """The gradient of the routers' own losses."""
    with Engine.build(recipe(Layout(config=EIGHT))) as engine:
        found: list[Tensor] = []
        batch = data(name)
        own_losses(engine.model, found, attention_mask(batch["targets"]))
        engine.model(batch["tokens"])
        parameters = dict(engine.named_parameters())
        gradients = torch.autograd.grad(sum(found), list(parameters.values()), allow_unused=True)
        pairs = zip(parameters, gradients, strict=True)
        return {name: gradient.clone() for name, gradient in pairs if gradient is not None}


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        assert (found[name] - reference).norm() <= tolerance * reference.norm() + 1e-9, name


@pytest.fixture(scope="module")
def expected(ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """Of each loss its gradients without the routers' own, and theirs by definition added."""
    [without] = ranks(1, gradients, Layout(config=EIGHT))
    found = {}
    for name, of_loss in without.items():
        [own] = ranks(1, by_definition, name)
        assert "layers.0.moe.router.gate.weight" in own
        found[name] = {key: gradient + own.get(key, 0.0) for key, gradient in of_loss.items()}
    return found


@pytest.mark.parametrize(
    ("count", "layout"),
    [
        (1, layout_of(BOTH)),
        (1, layout_of(BOTH, micro_batches=2, activation_checkpoint={"mode": "full"})),
        (1, layout_of(BOTH, compile="aot_eager")),
        (2, layout_of(BOTH, dp_shard=2, ep=2, micro_batches=2)),
        (2, layout_of(BOTH, dp_replicate=2)),
        (2, layout_of(BOTH, tp=2, ep=2)),
        (2, layout_of(BOTH, cp=2, micro_batches=2)),
        (2, layout_of(BOTH, pp=2, **PAIRS)),
    ],
)
def test_coefficients_mean_the_same_under_every_loss_and_layout(
    ranks: Ranks, expected: dict[str, dict[str, Tensor]], count: int, layout: Layout
) -> None:
    results = ranks(count, gradients, layout)
    for name, reference in expected.items():
        close({key: t for result in results for key, t in result[name].items()}, reference)


@cache
def further(coefficient: str) -> Any:
    return replace(FURTHER, moe=replace(FURTHER.moe, **{coefficient: 0.1}))


@pytest.mark.parametrize("coefficient", COEFFICIENTS)
def test_tokens_ahead_are_counted_in_several_micro_batches(ranks: Ranks, coefficient: str) -> None:
    [whole] = ranks(1, gradients, layout_of(further(coefficient)), ("cross_entropy",))
    [without] = ranks(1, gradients, layout_of(FURTHER), ("cross_entropy",))
    gates = [name for name in whole["cross_entropy"] if name.endswith("router.gate.weight")]
    assert len(gates) == 3  # of one layer, and of the two that look further
    for name in gates:
        assert not torch.allclose(whole["cross_entropy"][name], without["cross_entropy"][name], rtol=1e-2)
    [pieces] = ranks(1, gradients, layout_of(further(coefficient), micro_batches=4), ("cross_entropy",))
    close(pieces["cross_entropy"], whole["cross_entropy"])


@pytest.mark.parametrize("coefficient", COEFFICIENTS)
def test_a_stage_without_experts_keeps_step(ranks: Ranks, coefficient: str) -> None:
    moe = replace(WITHOUT_EXPERTS_FIRST.moe, **{coefficient: 0.1})
    config = replace(WITHOUT_EXPERTS_FIRST, moe=moe)
    [whole] = ranks(1, gradients, layout_of(config), ("cross_entropy",))
    parts = ranks(2, gradients, layout_of(config, pp=2, **PAIRS), ("cross_entropy",))
    close({k: t for part in parts for k, t in part["cross_entropy"].items()}, whole["cross_entropy"])


@component("model", "balanced", target="tests.engine.test_router_losses:balanced")
class Balanced(Qwen3):
    """A model of a plugin, whose coefficients are where no other config has them."""

    routers: list[float]


def balanced(config: Balanced, seq_len: int) -> Decoder:
    moe = replace(config.moe, **dict(zip(COEFFICIENTS, config.routers, strict=True)))
    model = build(replace(config, moe=moe), seq_len=seq_len)
    model.register_forward_pre_hook(lambda *_: report("forwards", 1.0, reduce="sum"))
    return model


def _of_plugin() -> tuple[dict[str, Tensor], float]:
    values = {field.name: getattr(EIGHT, field.name) for field in fields(EIGHT)}
    config = Balanced(**values, routers=list(COEFFICIENTS.values()))
    with collector.captured() as reported:
        found = gradients(layout_of(config, micro_batches=2), ("dpo",))
    return found["dpo"], float(reported.drain()["forwards"].value)


def test_coefficients_are_those_of_layers_and_counting_tokens_reports_nothing(
    ranks: Ranks, expected: dict[str, dict[str, Tensor]]
) -> None:
    [(found, forwards)] = ranks(1, _of_plugin)
    close(found, expected["dpo"])
    assert forwards == 2


def _refused(call: Callable[[], Any]) -> str:
    with pytest.raises(TitanError) as caught:
        call()
    assert not isinstance(caught.value, RankFailure)
    return f"{caught.value.message} / {caught.value.hint}"


def _twice(layout: Layout) -> tuple[str, str, bool]:
    """What a second call is told, and whether the step of the first goes on as if it had not been."""
    with Engine.build(recipe(layout)) as engine, Engine.build(recipe(layout)) as other:
        for one in (engine, other):
            one.forward_backward(mine(one, data()))
        told = _refused(lambda: engine.forward_backward(mine(engine, data())))
        others = _refused(lambda: reduce_gradients(engine, lambda tensors: None))
        norms = [one.optim_step()["grad_norm"] for one in (engine, other)]
        engine.forward_backward(mine(engine, data()))
        engine.clear_gradients()
        engine.forward_backward(mine(engine, data()))
        return told, others, torch.equal(*norms)


@pytest.mark.parametrize("coefficient", COEFFICIENTS)
@pytest.mark.parametrize(("count", "mesh"), [(1, {}), (2, {"pp": 2})])
def test_a_second_call_in_a_step_is_refused(
    ranks: Ranks, count: int, mesh: dict[str, int], coefficient: str
) -> None:
    """By each rank of a pipeline, though only one of them has experts."""
    config = replace(WITHOUT_EXPERTS_FIRST, moe=replace(WITHOUT_EXPERTS_FIRST.moe, **{coefficient: 0.1}))
    for told, others, same in ranks(count, _twice, layout_of(config, **mesh, **PAIRS)):
        assert same
        assert coefficient in told and "engine.forward_backward([first, second])" in told
        assert "reduce_gradients" in others and coefficient in others


def _called_twice(layout: Layout) -> int:
    with Engine.build(recipe(layout)) as engine:
        for _ in range(2):
            engine.forward_backward(mine(engine, data()))
        return engine.status["accumulated"]


def test_without_losses_of_routers_a_step_may_take_several_calls(ranks: Ranks) -> None:
    assert ranks(1, _called_twice, layout_of(SHARED)) == [2]
