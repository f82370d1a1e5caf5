"""Activations that wait in the host's memory: the same bits, and less on the device."""

from __future__ import annotations

import gc
import shlex
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.cases import Layout, my_batches, recipe, wholes
from tests.ranks.layouts import EIGHT
from titan_offload import ActivationOffload
from titan_offload import activations as offload
from titan_offload.activations import Offload, offload_activations
from titan_testing import check_plugin, run_cli
from titancli.cli import main
from titancli.engine import Engine
from titancli.recipe.check import component_checks
from titancli.recipe.schema import ActivationCheckpoint, Compile, Pipeline

MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "every 2nd": {"mode": "selective", "selective_ac_option": "2"},
}
LAYOUTS = {
    **{f"one rank, {name}": (1, Layout(activation_checkpoint=mode)) for name, mode in MODES.items()},
    "one rank, compiled": (1, Layout(compile="aot_eager")),
    "one rank, compiled, by op": (
        1,
        Layout(compile="aot_eager", activation_checkpoint={"mode": "selective", "selective_ac_option": "op"}),
    ),
    "one rank, bf16, two micro-batches": (1, Layout(dtype="bfloat16", micro_batches=2)),
    "FSDP2, never reshard": (2, Layout({"dp_shard": 2}, reshard="never")),
    "FSDP2, documents": (2, Layout({"dp_shard": 2}, documents=True)),
    "TP2": (2, Layout({"tp": 2})),
    "CP2": (2, Layout({"cp": 2}, activation_checkpoint={"mode": "full"})),
    "EP2": (2, Layout({"dp_shard": 2, "ep": 2}, config=EIGHT)),
    "PP2": (2, Layout({"pp": 2}, pipeline={"schedule": "1F1B"})),
    "PP2, interleaved": (2, Layout({"pp": 2}, pipeline={"schedule": "Interleaved1F1B"})),
}


def test_the_plugin_is_sound() -> None:
    check_plugin("titan-offload")


def two_steps(layout: Layout, offloaded: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Losses and gradients, and how many storages were moved."""
    moved: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "LEAST", 1)
        kept = offload._Call.leave

        def watched(call: Any, staying: Any) -> None:
            kept(call, staying)
            moved.append(len(call.storages))

        patch.setattr(offload._Call, "leave", watched)
        engine = Engine.build(recipe(layout))
        if offloaded:
            engine.hooks.add(Offload(engine))
        found: dict[str, torch.Tensor] = {}
        for step in range(2):
            loss = engine.forward_backward(my_batches(engine, step, layout.documents))["loss"]
            found[f"loss {step}"] = loss.clone()
            gradients = [(name, p.grad) for name, p in engine.named_parameters() if p.grad is not None]
            found |= {f"gradient {step} {name}": value for name, value in wholes(gradients).items()}
            engine.optim_step()
    return found, sum(moved)


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_gradients_are_the_same_bit_for_bit(ranks: Any, name: str) -> None:
    world, layout = LAYOUTS[name]
    for (expected, none), (found, moved) in zip(
        ranks(world, two_steps, layout, False), ranks(world, two_steps, layout, True), strict=True
    ):
        assert none == 0 < moved
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert torch.equal(value, found[key]), key


class Block(nn.Module):
    """Keeps views of one memory, a float of another shape, an index and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        one, two = (x @ self.weight).chunk(2, -1)
        order = x[:, 0].argsort()
        return x + torch.cat((one * two.sin(), two.tanh() * one), -1)[order] * scale


def blocks(count: int, *, keep_last: bool = True, offloaded: bool = True) -> nn.ModuleDict:
    torch.manual_seed(3)
    layers = nn.ModuleDict({str(number): Block() for number in range(count)})
    if offloaded:
        offload_activations(layers, torch.device("cpu"), keep_last=keep_last)
    return layers


def through(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    scale = torch.full((), 0.5)
    for layer in layers.values():
        x = layer(x, scale)
    return x


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 1)


def gradients(layers: nn.ModuleDict, times: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(4)
    x = torch.randn(6, 8, requires_grad=True)
    out = through(layers, x)
    return [
        grad
        for _ in range(times)
        for grad in torch.autograd.grad(out.square().sum(), [x, *layers.parameters()], retain_graph=True)
    ]


@pytest.mark.parametrize("keep_last", [True, False])
def test_a_graph_may_be_gone_through_twice_and_two_be_alive_at_once(keep_last: bool) -> None:
    expected = gradients(blocks(3, offloaded=False), 2)
    layers = blocks(3, keep_last=keep_last)
    first = through(layers, torch.randn(6, 8, requires_grad=True))  # never goes backward
    found = gradients(layers, 2)
    assert first.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def alive(kind: type) -> int:
    gc.collect()
    return sum(isinstance(one, kind) for one in gc.get_objects())


def storages_on_the_device() -> list[Any]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, offload._Storage) and one.device is not None]


def test_what_waits_on_the_host_is_not_on_the_device_and_nothing_is_left() -> None:
    before, kept = len(storages_on_the_device()), alive(offload._Kept)
    layers = blocks(4)
    out = through(layers, torch.randn(6, 8, requires_grad=True))
    assert len(storages_on_the_device()) == before  # all have left; the last block's were not moved
    out.sum().backward()
    assert len(storages_on_the_device()) == before
    assert alive(offload._Kept) == kept


def test_views_of_one_memory_share_it_afterwards() -> None:
    calls: list[Any] = []
    kept = offload._Call.leave

    def watched(call: Any, staying: Any) -> None:
        tensors = [one for one in call.kept if one.tensor is not None]
        memories = {one.tensor.untyped_storage()._cdata for one in tensors if one.tensor.is_floating_point()}
        kept(call, staying)
        calls.append((len(tensors), len(memories), len(call.storages)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload._Call, "leave", watched)
        through(blocks(2), torch.randn(6, 8, requires_grad=True))
    ((tensors, memories, moved),) = calls
    assert tensors > memories > moved > 0  # the weight and the scale stay


def test_a_block_that_raises_leaves_nothing_behind() -> None:
    layers = blocks(3)
    expected = gradients(layers)
    x = torch.randn(6, 8, requires_grad=True)
    with pytest.raises(RuntimeError):
        layers["1"](layers["0"](x, torch.tensor(1.0)), torch.ones(5))  # of no such shape
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(layers), strict=True))


def test_without_gradients_nothing_is_copied() -> None:
    layers = blocks(2)
    with torch.no_grad():
        out = through(layers, torch.randn(6, 8))
    assert not out.requires_grad
    reference = weakref.ref(out)
    del out
    assert reference() is None


# --------------------------------------------------------------------------------------------- refusals


def test_plan_proposes_it(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the cheapest change here, and what is printed can be pasted."""
    words = ["plan", "llama3_8b", "--gpu", "H100", "--world-size", "1", "training.local_batch_size=1"]
    words += ["training.dtype=bfloat16", "optimizer.state_dtype=bfloat16", "training.seq_len=32768"]
    assert main(words) == 0
    [change] = [line.strip() for line in capsys.readouterr().out.splitlines() if "callbacks=" in line]
    assert shlex.split(change) == ['callbacks=[{type="titan-offload/activation_offload"}]']
    assert main([*words, *shlex.split(change)]) == 0
    assert "verdict       fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "compiled", "schedule", "told"),
    [
        ({"mode": "selective"}, False, "1F1B", "what uncompiled blocks keep by operation"),
        ({"mode": "selective"}, True, "1F1B", ""),
        ({"mode": "selective", "selective_ac_option": "2"}, False, "1F1B", ""),
        ({"mode": "full"}, False, "1F1B", ""),
        ({"mode": "none"}, False, "InterleavedZeroBubble", "goes backward twice"),
    ],
)
def test_what_cannot_be_moved_is_refused(
    section: dict[str, Any], compiled: bool, schedule: str, told: str
) -> None:
    made = replace(
        recipe(Layout({"pp": 2})),
        activation_checkpoint=ActivationCheckpoint(**section),
        callbacks=[ActivationOffload()],
        compile=Compile(enable=compiled),
        pipeline=Pipeline(schedule=schedule, first_stage_less_layers=0, last_stage_less_layers=0),
    )
    found = [message for path, message, _ in component_checks(made) if path[:1] == ("callbacks",)]
    assert len(found) == bool(told) and all(told in message for message in found)


def test_twice_and_in_graphs_it_is_refused() -> None:
    made = replace(
        recipe(Layout()),
        compile=Compile(cuda_graphs="step"),
        callbacks=[ActivationOffload(), ActivationOffload()],
    )
    found = [message for path, message, _ in component_checks(made) if path[:1] == ("callbacks",)]
    assert len(found) == 4 and "cannot be captured" in found[0] and "moved once" in found[1]


def test_a_run_and_a_resume_are_those_without(tmp_path: Any) -> None:
    losses = []
    for number, words in enumerate((['callbacks=[{type="activation_offload"}]'], [])):
        run = ("--run-dir", str(tmp_path / str(number)))
        settings = ("activation_checkpoint.mode=full", "training.seq_len=64", *words)
        first = run_cli("train", "llama3_debug", *run, "training.steps=2", *settings)
        again = run_cli("train", "llama3_debug", *run, "--resume", "training.steps=3", *settings)
        assert first.code == again.code == 0, first.stderr + again.stderr
        shown = (tmp_path / str(number) / "events.jsonl").read_text().splitlines()
        losses.append([line.partition('"loss": ')[2].partition(",")[0] for line in shown if '"step"' in line])
    assert losses[0] == losses[1] and any(losses[0])
