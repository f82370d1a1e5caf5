"""Steps of next to nothing, under every registered loss: right, skipped and counted, or refused by name.

What is right is made of the whole logits by autograd, and of the routers' own losses by their definitions. A
new loss gets its rows by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.cases import Layout, recipe, wholes
from tests.engine.test_guard import bits
from tests.engine.test_router_losses import BOTH, attention_mask, own_losses
from tests.ranks import Ranks
from tests.ranks.layouts import EIGHT, FURTHER
from titan_rl import Grpo
from titan_testing.behaviour.losses import example, log_probs
from titan_testing.behaviour.subject import Subject
from titancli import registry
from titancli.engine import Engine
from titancli.engine.inputs import checked
from titancli.errors import TitanError
from titancli.losses import SFT
from titancli.protocols.batch import IGNORE, Batch
from titancli.protocols.result import LossResult
from titancli.recipe.schema import Stability
from titancli.registry.component import build

pytestmark = pytest.mark.ranks
PLAIN, ROUTED = (replace(c, n_layers=1, moe=replace(c.moe, load_balance_coeff=None)) for c in (EIGHT, BOTH))
"""Without biases, which a step moves: the next one would be of another model."""
OWN = ("titan/", "titan-rl/", "titan-preference/dpo")
LOSSES = [name for name, _ in registry.current().components("loss") if name.startswith(OWN)]
MORE: dict[str, list[Any]] = {
    "titan-rl/grpo": [Grpo(length_norm="token"), Grpo(length_norm="constant", constant=9)],
}
"""Other values of a loss, which divide by something else."""
CASES = (
    "usual",
    "no target",
    "one target",
    "one row",
    "no target on one rank",
    "zeros",
    "NaN where no target is",
    "NaN at a target",
)


def variants() -> Iterator[tuple[str, Any]]:
    """Losses with their defaults, with a term that is left out by default, and with the values of MORE."""
    for name in LOSSES:
        default = registry.current().find("loss", name)()
        yield name, default
        if any(field.name == "kl_coef" for field in fields(default)):
            yield f"{name} kl", replace(default, kl_coef=0.1)
        yield from ((f"{name} {number}", config) for number, config in enumerate(MORE.get(name, ())))


def data(config: Any) -> Batch:
    """Four rows with the inputs that a loss takes; the last row has no target."""
    loss = Subject("", "loss", config, lambda config: build(config), Path())
    batch = dict(example(loss).batch)
    batch.pop("entropy", None)
    return Batch({name: value for name, value in batch.items() if name != "positions"})


def inputs(batch: Batch) -> list[str]:
    return [name for name, value in batch.items() if value.is_floating_point()]


def case(batch: Batch, name: str) -> Batch:
    """The rows of all ranks."""
    found = {key: value.clone() for key, value in batch.items()}
    targets = found["targets"]
    there = targets != IGNORE
    if name == "no target":
        targets.fill_(IGNORE)
    elif name == "one target":
        kept = int(targets[0, 5])
        targets.fill_(IGNORE)
        targets[0, 5] = kept
    elif name == "one row":
        found = {key: value[:2] for key, value in found.items()}
    elif name == "no target on one rank":
        targets[2:] = IGNORE
    elif name == "zeros":
        found |= {key: torch.zeros_like(found[key]) for key in inputs(batch)}
    elif name == "NaN where no target is":
        whole = there.any(1).view(-1, 2).all(1).repeat_interleave(2)  # of rows that come in pairs, both
        for key in inputs(batch):
            read = there if found[key].ndim == 2 else whole
            found[key] = torch.where(read, found[key], torch.nan)
    elif name == "NaN at a target":
        for key in inputs(batch):
            found[key][(0, 5) if found[key].ndim == 2 else 0] = torch.nan
    return Batch(found)


def expected_of(engine: Engine, loss: Any, batch: Batch, *, routed: bool) -> dict[str, Tensor] | None:
    """The gradients that a step is made with; None: there are none to step with."""
    logits: list[Tensor] = []
    hooks = own_losses(engine.model, logits, attention_mask(batch["targets"]))
    whole = engine.model(batch["tokens"])
    for hook in hooks:
        hook.remove()
    out = log_probs(whole, batch["targets"]) if loss.output == "logprobs" else whole
    result = checked(loss(out, batch), loss)
    if not result.weight > 0:
        return None
    parameters = dict(engine.named_parameters())
    total = result.sum / result.weight + (sum(logits) if routed else 0.0)
    found = torch.autograd.grad(total, list(parameters.values()))
    gradients = {key: gradient.clone() for key, gradient in zip(parameters, found, strict=True)}
    return gradients if all(gradient.isfinite().all() for gradient in found) else None


Found = dict[str, dict[str, Any]]
"""By variant and case gradients; None where the step is skipped; a refusal's words."""


def right(routed: bool) -> Found:
    """What should come of each."""
    found: Found = {label: {} for label, _ in variants()}
    with Engine.build(recipe(Layout(config=PLAIN))) as engine:
        for label, config in variants():
            loss, batch = build(config), data(config)
            for one in CASES:
                # The NaN that nobody may read is not there.
                given = case(batch, "usual" if one == "NaN where no target is" else one)
                try:
                    loss.check_batch(given.split(given.rows // 2)[0])
                    found[label][one] = expected_of(engine, loss, given, routed=routed)
                except TitanError as error:
                    found[label][one] = error.message
    return found


def engine_of(mesh: dict[str, int], routed: bool) -> Engine:
    made = recipe(Layout(mesh=mesh, config=ROUTED if routed else PLAIN))
    stability = Stability(skip_nonfinite=True, sigma=0.0, max_skips=10_000)
    return Engine.build(replace(made, stability=stability))


def steps(mesh: dict[str, int], routed: bool) -> Found:
    """What an engine makes of each, in two micro-batches, one after the other or on two ranks. The weights
    stay as they are."""
    found: Found = {label: {} for label, _ in variants()}
    with engine_of(mesh, routed) as engine:
        for label, config in variants():
            batch = data(config)
            for one in CASES:
                given = case(batch, one)
                halves = given.split(given.rows // 2)
                found[label][one] = step(engine, [halves[engine.mesh.dp_rank]] if mesh else halves, config)
    return found


def step(engine: Engine, batches: list[Batch], loss: Any) -> Any:
    before, skipped, number = bits(engine), float(engine.guard.skipped), engine.step
    try:
        metrics = engine.forward_backward(batches, loss)
    except TitanError as error:
        assert bits(engine) == before and engine.status["accumulated"] == 0
        return error.message
    accumulated = engine.pending
    assert accumulated is not None
    weight = accumulated.weight.clone()
    gradients = wholes((name, p.grad / weight) for name, p in engine.named_parameters() if p.grad is not None)
    metrics |= engine.optim_step(lr=0.0)
    assert engine.step == number + 1
    if float(metrics["skipped_steps"]) > skipped:
        assert bits(engine) == before
        assert not weight <= 0 or (float(metrics["grad_norm"]), float(metrics["loss"])) == (0.0, 0.0)
        return None
    tensors, _ = engine.save_state()
    assert all(torch.as_tensor(tensor).isfinite().all() for tensor in wholes(tensors.items()).values())
    assert bits(engine) != before
    return gradients


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "with losses of routers"])
def table(ranks: Ranks, request: pytest.FixtureRequest) -> tuple[Found, list[tuple[str, Found]]]:
    """What should come of each, and what came of it on one rank and on each of two."""
    [reference] = ranks(1, right, request.param)
    layouts: list[dict[str, int]] = [{}, {"dp_shard": 2}]
    made = [(mesh, ranks(2 if mesh else 1, steps, mesh, request.param)) for mesh in layouts]
    return reference, [(f"on {len(results)}", found) for _, results in made for found in results]


@pytest.mark.parametrize("label", [label for label, _ in variants()])
def test_a_step_of_next_to_nothing(table: tuple[Found, list[tuple[str, Found]]], label: str) -> None:
    reference, results = table
    for where, found in results:
        for one, expected in reference[label].items():
            here = found[label][one]
            if not isinstance(expected, dict):
                assert here == expected, (one, where)
                continue
            assert isinstance(here, dict), (one, where, here)
            for name, gradient in expected.items():
                error = (here[name] - gradient).norm()
                assert error <= 1e-4 * gradient.norm() + 1e-8, (one, where, name)


def test_every_loss_has_cases_that_step_and_such_that_do_not(table: Any) -> None:
    """Else the table would compare nothing with nothing."""
    reference, _ = table
    assert len(LOSSES) >= 8
    for label, found in reference.items():
        assert isinstance(found["usual"], dict) and isinstance(found["NaN where no target is"], dict), label
        assert found["no target"] is None, label
        needs = {*build(dict(variants())[label]).needs} - {"targets"}
        assert not needs or found["NaN at a target"] is None, label


class Weighted:
    """A script's own loss, which leaves it to the engine to know where there is a target."""

    output = "logprobs"

    def token_weights(self, batch: Batch) -> Tensor:
        return batch["weights"]

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        there = batch["targets"] != IGNORE
        weights = torch.where(there, batch["weights"], 0.0)
        return LossResult(-(out * weights).sum(), weights.sum())


def weighted(layout: Layout, filling: float) -> tuple[float, dict[str, Tensor]]:
    with Engine.build(recipe(layout)) as engine:
        batch = data(SFT())
        weights = torch.where(batch["targets"] != IGNORE, batch["weights"], filling)
        loss = engine.forward_backward(Batch({**batch, "weights": weights}), Weighted())["loss"]
        return float(loss), wholes((name, p.grad) for name, p in engine.named_parameters())


@pytest.mark.parametrize("config", [PLAIN, FURTHER], ids=["next token", "tokens ahead"])
def test_weights_are_not_read_where_there_is_no_target(ranks: Ranks, config: Any) -> None:
    (loss, gradients), (expected, reference) = (
        ranks(1, weighted, Layout(config=config), filling)[0] for filling in (float("nan"), 0.0)
    )
    assert loss == expected and loss == loss
    assert all(torch.equal(gradients[name], gradient) for name, gradient in reference.items())
