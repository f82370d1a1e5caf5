"""What one spread of experts saves, any other loads; and the export is that of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.cases import Layout, my_batches, recipe, whole_batch, wholes
from tests.parallel.test_expert import EIGHT, layout
from titancli.checkpoint import CheckpointReader, export_hf
from titancli.engine import Engine
from titancli.errors import EnvironmentProblem
from titancli.models import Qwen3
from titancli.models.blocks.hf import DecoderHF
from titancli.models.blocks.moe import moe_layers
from titancli.models.blocks.state import named_state

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "one rank": (1, Layout(config=EIGHT)),
    "FSDP2": (2, layout(dp_shard=2)),
    "EP2": (2, layout(dp_shard=2, ep=2)),
    "EP2xFSDP2": (4, layout(dp_shard=4, ep=2)),
    "EP4": (4, layout(dp_shard=4, ep=4)),
    "EP2xTP2": (4, layout(dp_shard=2, tp=2, ep=2)),
}
BEFORE, AFTER = 2, 2
"""Steps before the checkpoint, and after it."""
LATER = pytest.mark.slow
FROM = [pytest.param("one rank", marks=LATER), pytest.param("EP2xFSDP2", marks=LATER), "EP2xTP2"]


def steps(engine: Engine, count: int) -> None:
    for step in range(engine.step, engine.step + count):
        engine.forward_backward(my_batches(engine, step))
        engine.optim_step()


def state(engine: Engine) -> dict[str, torch.Tensor]:
    return wholes(engine.save_state()[0].items())


def train_and_save(layout: Layout, folder: str) -> dict[str, torch.Tensor]:
    engine = Engine.build(recipe(layout))
    steps(engine, BEFORE)
    engine.save(folder)
    return state(engine)


def load_and_train(layout: Layout, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = Engine.build(recipe(layout))
    engine.load(folder)
    loaded = state(engine)
    steps(engine, AFTER)
    return loaded, state(engine)


def uninterrupted() -> dict[str, torch.Tensor]:
    engine = Engine.build(recipe(Layout(config=EIGHT)))
    steps(engine, BEFORE + AFTER)
    return state(engine)


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for name in ("one rank", "EP2xFSDP2", "EP2xTP2"):
        world, this = LAYOUTS[name]
        place = folder / name / f"step-{BEFORE}"
        found[name] = place, ranks(world, train_and_save, this, str(place))[0]
    return found


def test_names_and_biases_are_those_of_one_rank(saved):
    expected = saved["one rank"][1]
    assert "model.layers.0.moe.expert_bias" in expected
    # In a layer each bias may go up in one step and down in the next.
    assert any(expected[f"model.layers.{layer}.moe.expert_bias"].any() for layer in (0, 1))
    assert "optimizer.layers.0.moe.experts.w1.exp_avg" in expected
    assert not any(name.startswith("optimizer.") and "expert_bias" in name for name in expected)
    for name, (folder, tensors) in saved.items():
        assert tensors.keys() == expected.keys(), name
        assert set(CheckpointReader(folder).names()) == expected.keys(), name
        for layer in (0, 1):
            bias = f"model.layers.{layer}.moe.expert_bias"
            assert torch.equal(tensors[bias], expected[bias]), name


@pytest.mark.parametrize("before", FROM)
def test_every_spread_of_experts_goes_on_from_every_other(ranks, saved, before):
    folder, tensors = saved[before]
    reference = ranks(1, uninterrupted)[0]
    for after, (world, this) in LAYOUTS.items():
        for loaded, trained in ranks(world, load_and_train, this, str(folder)):
            assert loaded.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(loaded[name], tensor), f"{before} -> {after}: {name}"
            for name, expected in reference.items():
                error = (trained[name] - expected).norm() / expected.norm().clamp(min=1e-12)
                # Moments are sums of squares of gradients, which are close to 1e-5 themselves.
                assert error <= 2e-5, f"{before} -> {after}: {name} is off by {error:.1e}"


def logits_and_weights(layout: Layout) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
    engine = Engine.build(recipe(layout))
    steps(engine, 1)
    weights = {name: None if value is None else value.clone() for name, value in engine.weights()}
    return state(engine), weights


def test_an_export_of_spread_experts_loads_in_transformers(ranks, tmp_path):
    world, this = LAYOUTS["EP2"]
    (tensors, weights), (_, elsewhere) = ranks(world, logits_and_weights, this)
    assert weights.keys() == elsewhere.keys()
    assert all(value is None for value in elsewhere.values())
    assert len([name for name in weights if ".mlp.experts.7." in name]) == 2 * 3
    model = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    form = DecoderHF(EIGHT)
    export_hf(model, form, {}, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    from titancli.models.blocks.decoder import build

    ours = build(EIGHT, seq_len=16)
    ours.load_state_dict(model)
    for layer in moe_layers(ours).values():
        layer.clear_bias()  # which has no place in the export
    tokens = whole_batch()["tokens"]
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    for name, value in weights.items():
        assert value is not None
        source = next(ours_name for ours_name in model if name in form.sources(ours_name))
        assert torch.equal(value, dict(form.to_hf(source, model[source]))[name]), name


def begun_from(layout: Layout, folder: str) -> dict[str, torch.Tensor]:
    engine = Engine.build(replace(recipe(layout), weights=Path(folder)))
    return {name: tensor for name, tensor in state(engine).items() if name.startswith("model.")}


def refused(folder: str) -> str:
    dense = Qwen3(dim=32, n_layers=2, n_heads=4, head_dim=8, hidden_dim=16, vocab_size=64)
    try:
        begun_from(Layout(config=dense), folder)
    except EnvironmentProblem as problem:
        return problem.message
    return "nothing was refused"


def test_spread_experts_begin_from_a_hugging_face_folder(ranks, tmp_path):
    from titancli.models.blocks.decoder import build

    model = build(EIGHT, seq_len=16)
    model.init_weights(lambda name: torch.Generator().manual_seed(len(name)))
    tensors = {name: tensor.detach() for name, tensor in named_state(model)}
    export_hf(tensors, DecoderHF(EIGHT), {}, tmp_path / "hf")
    for name in ("one rank", "EP2"):
        world, this = LAYOUTS[name]
        for loaded in ranks(world, begun_from, this, str(tmp_path / "hf")):
            assert loaded.keys() == {f"model.{key}" for key in tensors}
            assert all(torch.equal(loaded[f"model.{key}"], tensor) for key, tensor in tensors.items())
    [message] = ranks(1, refused, str(tmp_path / "hf"))
    assert message.startswith(f"weights: {tmp_path / 'hf'} holds the weights of a different model:\n")
    assert "  moe is not set in the recipe" in message
