"""Losses with parameters of their own: trained, sharded, saved and loaded with the model's."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import critics
from tests.engine.cases import Layout, my_batches, recipe, small, whole_batch, wholes
from tests.engine.critics import Critic, Part, Weights, Without
from tests.ranks import Ranks
from tests.ranks.comparison import difference
from tests.ranks.layouts import EIGHT
from titancli import Engine, Sample, TitanError, registry
from titancli.converters import LoRA
from titancli.engine.dry_run import dry_run
from titancli.errors import PluginError
from titancli.losses import CrossEntropy
from titancli.models.roles import roles_of
from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import estimate

OWN = {"loss.hidden.weight", "loss.hidden.bias", "loss.scale"}
WITH = small(loss=Critic())
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "accumulation": (1, small(loss=Critic(), micro_batches=4)),
    "DDP2": (2, small({"dp_replicate": 2}, loss=Critic())),
    "FSDP2": (2, small({"dp_shard": 2}, loss=Critic())),
    "FSDP2, always reshard": (2, small({"dp_shard": 2}, loss=Critic(), reshard="always", micro_batches=2)),
    "TP2": (2, small({"tp": 2}, loss=Critic())),
    "CP2": (2, small({"cp": 2}, loss=Critic())),
    "PP2": (2, small({"pp": 2}, loss=Critic())),
    "FSDP2 TP2": (4, small({"dp_shard": 2, "tp": 2}, loss=Critic())),
    "CP2 TP2": (4, small({"cp": 2, "tp": 2}, loss=Critic())),
    "PP2 TP2": (4, small({"pp": 2, "tp": 2}, loss=Critic())),
}


def gradients(layout: Layout) -> dict[str, torch.Tensor]:
    with Engine.build(recipe(layout, max_norm=1e9)) as engine:
        one = whole_batch().split(2)[0]  # without gradients, and by samples, on all ranks the same
        rows = [Sample(tokens.tolist(), [1.0] * len(tokens)) for tokens in one["tokens"]]
        values = [engine.forward(one, return_values=True), *engine.forward(rows, return_values=True)]
        made = engine.forward_backward(my_batches(engine))
        assert engine.pending is not None
        weight = engine.pending.weight
        named = wholes((name, p.grad / weight) for name, p in engine.named_parameters() if p.grad is not None)
        found = {f"gradient {name}": tensor for name, tensor in named.items()}
        found |= {f"loss {name}": made[name].clone() for name in ("loss", "value_error")}
        found |= {f"loss values {number}": each for number, each in enumerate(values)}
        found["norm"] = engine.optim_step()["grad_norm"].clone()
        for step in (1, 2):
            engine.forward_backward(my_batches(engine, step))
            engine.optim_step()
        return found | {f"weight {n}": tensor for n, tensor in wholes(engine.named_parameters()).items()}


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = ranks(1, gradients, WITH)[0]
    assert {f"gradient {name}" for name in OWN} < found.keys()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_them_alike(ranks: Ranks, alone: dict[str, torch.Tensor], name: str) -> None:
    count, layout = LAYOUTS[name]
    found = difference(ranks(count, gradients, layout), alone)
    assert max(found.loss, found.norm, found.gradient) < 3e-6, found
    assert found.weight < 3e-5, found  # Adam divides small gradients by small ones


def among_experts(**mesh: int) -> Layout:
    return Layout(mesh=mesh, config=EIGHT, loss=Critic())


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh",
    [dict(dp_shard=2, ep=2), dict(tp=2, ep=2), dict(cp=2, ep=2), dict(dp_shard=2, tp=2, ep=4)],
    ids=str,
)
def test_beside_experts_every_layout_trains_them_alike(ranks: Ranks, mesh: dict[str, int]) -> None:
    count = math.prod(size for name, size in mesh.items() if name != "ep")
    expected = ranks(1, gradients, among_experts())[0]
    found = difference(ranks(count, gradients, among_experts(**mesh)), expected)
    assert max(found.loss, found.norm, found.gradient) < 5e-6, found
    assert found.weight < 5e-5, found


def saved_and_gone_on(layout: Layout, folder: Path) -> dict[str, torch.Tensor]:
    with Engine.build(recipe(layout)) as engine:
        for step in range(2):
            engine.forward_backward(my_batches(engine, step))
            engine.optim_step()
        engine.save(folder)
        return trained_on(engine)


def loaded_and_gone_on(layout: Layout, folder: Path) -> dict[str, torch.Tensor]:
    with Engine.build(recipe(layout)) as engine:
        engine.load(folder)
        return trained_on(engine)


def trained_on(engine: Engine) -> dict[str, torch.Tensor]:
    for step in range(2, 4):
        engine.forward_backward(my_batches(engine, step))
        engine.optim_step()
    return {f"weight {name}": tensor for name, tensor in wholes(engine.named_parameters()).items()}


@pytest.mark.ranks
def test_a_checkpoint_is_gone_on_from_on_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "step-2"
    before = ranks(2, saved_and_gone_on, LAYOUTS["FSDP2"][1], folder)
    again = ranks(2, loaded_and_gone_on, LAYOUTS["FSDP2"][1], folder)
    assert all(torch.equal(again[0][name], before[0][name]) for name in before[0])
    for name in ("accumulation", "TP2", "PP2", "CP2"):
        count, layout = LAYOUTS[name]
        found = difference(ranks(count, loaded_and_gone_on, layout, folder), before[0])
        assert found.weight < 1e-5, (name, found)


def raises_then_goes_on(layout: Layout) -> None:
    """Another loss is used in between, and the loss raises in the middle of a step."""
    with Engine.build(recipe(layout)) as engine:
        own: Any = engine.loss
        batches = my_batches(engine)
        engine.forward_backward(batches, CrossEntropy())
        engine.optim_step()
        expected = engine.evaluate(batches)
        own.goal = None
        with pytest.raises((TypeError, TitanError), match="NoneType"):
            engine.forward_backward(batches)
        own.goal = 1.0
        assert engine.evaluate(batches)["loss"] == expected["loss"]
        engine.forward_backward(batches)
        engine.optim_step()
        assert engine.evaluate(batches)["loss"] < expected["loss"]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["FSDP2", "TP2"])
def test_an_error_inside_leaves_the_engine_usable(ranks: Ranks, name: str) -> None:
    count, layout = LAYOUTS[name]
    ranks(count, raises_then_goes_on, layout)


# ---------------------------------------------------------------------------------------------- one rank


@pytest.fixture
def plugin() -> Iterator[Layout]:
    """Critic as a plugin's, so that there are lock files of it."""
    registry.configure(files=[Path(critics.__file__)])
    try:
        yield small(loss=registry.current().find("loss", "critic")())
    finally:
        registry.configure()


def test_they_have_a_role_and_count_as_parameters() -> None:
    with Engine.build(recipe(WITH)) as engine, Engine.build(recipe(small())) as plain:
        names = {name for name, _ in engine.trained_parameters()}
        assert names - {name for name, _ in plain.trained_parameters()} == OWN
        assert engine.parameter_count - plain.parameter_count == 32 * 3 + 3 + 3
        assert {roles_of(engine.model)[name] for name in OWN} == {"output"}
        assert {name for name, _ in engine.weights()} == {name for name, _ in plain.weights()}


def test_values_are_of_a_loss_that_has_them() -> None:
    with Engine.build(recipe(small())) as engine:
        with pytest.raises(TitanError, match="the loss CrossEntropy of the recipe has no values"):
            engine.forward(my_batches(engine)[0], return_values=True)
        with pytest.raises(TitanError, match="logits or values, not both"):
            engine.forward(my_batches(engine)[0], return_values=True, return_logits=True)
        engine.forward_backward(my_batches(engine))


def test_a_snapshot_has_them() -> None:
    with Engine.build(recipe(WITH)) as engine:
        batches = my_batches(engine)
        engine.forward_backward(batches)
        engine.optim_step()
        with engine.snapshot() as copy:
            assert copy.evaluate(batches)["loss"] == engine.evaluate(batches)["loss"]


def test_the_recipes_loss_may_be_passed_and_no_other() -> None:
    with Engine.build(recipe(WITH)) as engine:
        batches = my_batches(engine)
        expected = engine.evaluate(batches)["loss"]
        assert engine.evaluate(batches, Critic())["loss"] == expected
        assert engine.evaluate(batches, engine.loss)["loss"] == expected
        with pytest.raises(TitanError, match="the loss Value has the parameter scale, which no"):
            engine.evaluate(batches, Critic(goal=2.0))
        assert engine.evaluate(batches)["loss"] == expected
    with Engine.build(recipe(small())) as engine, pytest.raises(TitanError, match="the loss Value has the"):
        engine.forward_backward(my_batches(engine), Critic())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Without(), "has parameters, but no method init_weights"),
        (Part(), 'has parameters, but its output is "projection"'),
        (Weights(), "has parameters, but declares token_weights"),
    ],
)
def test_losses_that_could_not_be_trained_are_refused(loss: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        Engine.build(recipe(small(loss=loss)))


def test_weights_without_them_begin_anew(
    plugin: Layout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As an SFT checkpoint at the beginning of a reward model; but a state lacks nothing."""
    plain, ours, folder = recipe(small()), recipe(plugin), tmp_path / "sft"
    with Engine.build(plain) as engine:
        engine.forward_backward(my_batches(engine))
        engine.optim_step()
        engine.save(folder)
    with Engine.build(ours) as engine:
        begun = {name: p.clone() for name, p in engine.named_parameters() if name in OWN}
    caplog.set_level(logging.INFO)
    with Engine.build(replace(ours, weights=folder)) as engine:
        names = "model.loss.hidden.bias, model.loss.hidden.weight, model.loss.scale"
        assert f"not in {folder}, and so left as they are: {names}" in caplog.text
        found = dict(engine.named_parameters())
        assert all(torch.equal(found[name], begun[name]) for name in OWN)
        with pytest.raises(TitanError, match=r"it lacks: model\.loss\.hidden\.bias"):
            engine.load(folder)
        engine.load(folder, optimizer=False)
        engine.export(tmp_path / "hf")
        assert "the parameters of the loss Value are left out" in caplog.text
    with Engine.build(replace(ours, weights=tmp_path / "hf")):
        assert "has no parameters of the loss" in caplog.text


def test_frozen_engines_have_them_and_others_leave_them_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "critic"
    with Engine.build(recipe(WITH)) as engine:
        batches = my_batches(engine)
        engine.forward_backward(batches)
        engine.optim_step()
        engine.save(folder)
        expected, log_probs = engine.evaluate(batches)["loss"], engine.forward(batches[0])
    with Engine.frozen(replace(recipe(WITH), weights=folder)) as frozen:
        assert frozen.evaluate(batches)["loss"] == expected
    with Engine.frozen(replace(recipe(small()), weights=folder)) as plain:
        assert torch.equal(plain.forward(batches[0]), log_probs)
    assert f"in {folder} alone, and so left out: model.loss.hidden.bias" in caplog.text


def test_adapters_are_trained_beside_them_and_saved_with_them(plugin: Layout, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapters"
    with Engine.build(recipe(small())) as engine:
        engine.save(base)
    layout = replace(plugin, converters=[LoRA(rank=4, targets=["layers.*.wq"])])
    adapted = replace(recipe(layout), weights=base)
    with Engine.build(adapted) as engine:
        names = {name for name, _ in engine.trained_parameters()}
        assert names > OWN and all("lora" in name for name in names - OWN)
        batches = my_batches(engine)
        engine.forward_backward(batches)
        engine.optim_step()
        engine.save(folder)
        expected = engine.evaluate(batches)["loss"]
    with Engine.build(replace(recipe(layout), weights=folder)) as engine:
        assert engine.evaluate(batches)["loss"] == expected
        engine.export(tmp_path / "merged")
        engine.export(tmp_path / "peft", form="peft")


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp_shard": 2}], ids=str)
def test_a_dry_run_and_a_plan_count_them(plugin: Layout, mesh: dict[str, int]) -> None:
    """Of two ranks, those with the last stage."""
    world = 2 if mesh else 1
    ours, plain = recipe(replace(plugin, mesh=mesh)), recipe(small(mesh))
    runs = dry_run(ours, world).ranks, dry_run(plain, world).ranks
    own = 32 * 3 + 3 + 3
    more = runs[0][-1].parameters - runs[1][-1].parameters
    assert own // 2 <= more <= own
    plans = [estimate(one, one.degrees(world), DEVICES["H100"]) for one in (ours, plain)]
    sizes = [plan.work.blueprint.size for plan in plans if plan is not None]
    worst = [max(rank.parameters for rank in plan.ranks) for plan in plans if plan is not None]
    assert sizes[0] - sizes[1] == own and worst[0] > worst[1]
