"""Biases that balance experts stay at zero where the weights know of none and an export has no place."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.cases import Layout, my_batches, recipe
from tests.ranks.layouts import EIGHT, LATENT
from titancli.converters import LoRA
from titancli.converters.lora import Adapters
from titancli.engine import Engine
from titancli.errors import RecipeError
from titancli.models.blocks.moe import moe_layers
from titancli.observe.metrics import collector

pytestmark = pytest.mark.ranks


def moved(engine: Engine) -> bool:
    """Whether a step moves a bias of this rank's layers."""
    layers = [layer for part in engine.parts for layer in moe_layers(part).values()]
    before = [layer.expert_bias.clone() for layer in layers]
    engine.forward_backward(my_batches(engine))
    engine.optim_step()
    return any(not layer.expert_bias.equal(bias) for layer, bias in zip(layers, before, strict=True))


def tuned(config: Any, folder: Path) -> dict[str, bool]:
    """What moves biases: a run from scratch, one from weights without biases, …"""
    layout = Layout(mesh={"dp_shard": 2}, config=config)
    with Engine.build(recipe(layout)) as scratch:
        scratch.save(folder / "plain")
        found = {"scratch": moved(scratch)}
        scratch.save(folder / "balanced")
    given = recipe(layout)
    with Engine.build(replace(given, weights=folder / "plain")) as engine:
        found["weights"] = moved(engine)
        engine.save(folder / "own")
        engine.load(folder / "own")
        found["resumed"] = moved(engine)
        engine.load(folder / "balanced")
        found["resumed from a balanced one"] = moved(engine)
    with Engine.build(replace(given, weights=folder / "balanced")) as engine:
        found["balanced weights"] = moved(engine)
    return found


def test_weights_without_biases_are_trained_without(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2, tuned, EIGHT, tmp_path):
        assert found == {
            "scratch": True,
            "weights": False,
            "resumed": False,
            "resumed from a balanced one": True,
            "balanced weights": True,
        }


def test_a_form_that_has_a_place_for_biases_is_balanced_on(ranks: Any, tmp_path: Path) -> None:
    v3 = replace(LATENT, moe=replace(LATENT.moe, score_func="sigmoid"))
    for found in ranks(2, tuned, v3, tmp_path):
        assert all(found.values())


def test_that_the_biases_stay_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = recipe(Layout(config=EIGHT))
    with Engine.build(given) as engine:
        engine.save(tmp_path / "plain")
    with (
        caplog.at_level(logging.WARNING, "titancli"),
        Engine.build(replace(given, weights=tmp_path / "plain")),
        Engine.build(replace(given, weights=tmp_path / "plain"), frozen=True),
    ):
        assert caplog.text.count("model.moe.load_balance_coeff is treated as 0") == 1


def test_of_a_run_that_goes_on_its_own_checkpoint_says_whether_they_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = recipe(Layout(config=EIGHT))
    with Engine.build(given) as engine:
        engine.save(tmp_path / "plain")
        assert moved(engine)
        engine.save(tmp_path / "balanced")
    for own, said in {"plain": 1, "balanced": 0}.items():
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "titancli"),
            Engine.build(replace(given, weights=tmp_path / "gone"), checkpoint=tmp_path / own) as engine,
        ):
            assert "load_balance_coeff" not in caplog.text
            engine.load(tmp_path / own)
            assert caplog.text.count("load_balance_coeff is treated as 0") == said
            assert caplog.text.count("load_balance_coeff") == said
            assert moved(engine) is (own == "balanced")


def test_balancing_can_be_switched_off() -> None:
    off = replace(EIGHT, moe=replace(EIGHT.moe, load_balance_coeff=0.0))
    with Engine.build(recipe(Layout(config=off))) as engine:
        assert all(layer.expert_bias is None for layer in moe_layers(engine.model).values())
        engine.forward_backward(my_batches(engine))
        engine.optim_step()


def test_biases_of_weights_can_be_kept_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are applied and not moved, and with that LoRA's base stays."""
    balanced = replace(LATENT, moe=replace(LATENT.moe, score_func="sigmoid"))
    frozen = replace(balanced, moe=replace(balanced.moe, freeze_expert_bias=True))
    with Engine.build(recipe(Layout(config=balanced))) as engine:
        assert moved(engine)
        engine.save(tmp_path / "weights")
        with pytest.raises(RecipeError, match="expert_bias of the base without gradients") as caught:
            Adapters(LoRA()).convert(engine.model)
        assert "model.moe.freeze_expert_bias = true" in str(caught.value.hint)
        biases = {name: layer.expert_bias.clone() for name, layer in moe_layers(engine.model).items()}
    given = replace(recipe(Layout(config=frozen)), weights=tmp_path / "weights")
    for made in (given, replace(given, converters=[LoRA()])):
        with Engine.build(made) as engine:
            assert not moved(engine)
            for name, layer in moe_layers(engine.model).items():
                assert biases[name].any() and torch.equal(layer.expert_bias, biases[name])
    assert "load_balance_coeff" not in caplog.text
    assert caplog.text.count("biases of the experts stay as they are") == 2


def test_the_load_of_the_busiest_expert_is_reported_for_each_layer() -> None:
    """As many times the mean as the counts of all tokens say, also of a step without balancing."""
    off = replace(EIGHT, moe=replace(EIGHT.moe, load_balance_coeff=0.0))
    for config in (EIGHT, off):
        with Engine.build(recipe(Layout(config=config))) as engine:
            collector.drain()
            engine.forward_backward(my_batches(engine))
            counts = engine.model.token_counts()
            expected = {name: float(count.max() / count.float().mean()) for name, count in counts.items()}
            engine.optim_step()
        found = {name: float(reading.value) for name, reading in collector.drain().items()}
        assert found.pop("expert_load") == pytest.approx(max(expected.values()))
        assert found == pytest.approx({f"expert_load/{name}": load for name, load in expected.items()})
        assert len(found) > 1 and min(found.values()) > 1.0
