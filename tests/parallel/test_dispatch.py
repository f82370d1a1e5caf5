"""Another dispatcher in place of the all-to-all: the same numbers, and what goes wrong in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.cases import Layout, my_batches, recipe, wholes
from tests.parallel.gathering import GatheringHere
from tests.ranks.layouts import DEEP, EIGHT
from titan_testing import run_cli
from titancli.engine import Engine
from titancli.parallel import AllToAll
from titancli.planning.stand_in import on_a_cpu
from titancli.recipe.schema import Mesh

WEIGHED_FIRST = replace(EIGHT, moe=replace(EIGHT.moe, score_before_experts=True))
LAYOUTS = {
    "EP2": (2, Layout({"dp_shard": 2, "ep": 2}, config=EIGHT)),
    "EP2, DeepSeek": (2, Layout({"dp_shard": 2, "ep": 2}, config=DEEP)),
    "EP2, weights first": (2, Layout({"dp_shard": 2, "ep": 2}, config=WEIGHED_FIRST)),
    "EP2, AC full": (
        2,
        Layout({"dp_shard": 2, "ep": 2}, config=EIGHT, activation_checkpoint={"mode": "full"}),
    ),
    "EP2, accumulation, compiled": (
        2,
        Layout({"dp_shard": 2, "ep": 2}, config=EIGHT, micro_batches=2, compile="aot_eager"),
    ),
    "EP4": (4, Layout({"dp_shard": 4, "ep": 4}, config=EIGHT)),
    "FSDP2xTP2, EP2": (4, Layout({"dp_shard": 2, "tp": 2, "ep": 2}, config=EIGHT)),
}


def with_dispatcher(layout: Layout, dispatcher: Any) -> Any:
    made = recipe(layout)
    return replace(made, parallelize=replace(made.parallelize, expert_dispatch=dispatcher))


def two_steps(layout: Layout, dispatcher: Any) -> dict[str, torch.Tensor]:
    engine = Engine.build(with_dispatcher(layout, dispatcher))
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        found[f"loss {step}"] = engine.forward_backward(my_batches(engine, step))["loss"].clone()
        gradients = ((name, p.grad) for name, p in engine.named_parameters() if p.grad is not None)
        found |= {f"gradient {step} {name}": value for name, value in wholes(gradients).items()}
        engine.optim_step()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_another_dispatcher_gives_the_same_losses_and_gradients_bit_for_bit(ranks: Any, name: str) -> None:
    world, layout = LAYOUTS[name]
    own = ranks(world, two_steps, layout, AllToAll())
    other = ranks(world, two_steps, layout, GatheringHere())
    assert any("experts" in key for key in own[0])
    for expected, found in zip(own, other, strict=True):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert torch.equal(value, found[key]), key


def after_an_error(layout: Layout) -> tuple[str, float, float]:
    """The message of a step whose second layer fails, and what the next forward gives, with that of an engine
    in which nothing has failed."""
    engine = Engine.build(with_dispatcher(layout, GatheringHere(fails_at=1)))
    try:
        engine.forward_backward(my_batches(engine))
        message = ""
    except Exception as error:
        message = str(error)
    other = Engine.build(with_dispatcher(layout, GatheringHere()))  # two at once, on the same group
    return (
        message,
        float(engine.forward(my_batches(engine)[0]).sum()),
        float(other.forward(my_batches(other)[0]).sum()),
    )


@pytest.mark.ranks
def test_a_dispatcher_that_raises_ends_the_step_and_not_the_engine(ranks: Any) -> None:
    for message, again, other in ranks(2, after_an_error, LAYOUTS["EP2"][1]):
        assert "no way" in message and again == other


def test_a_dispatcher_is_a_plugins_component(tmp_path: Path) -> None:
    """By name, from a file, in a run of two ranks: the losses of the all-to-all."""
    losses = []
    for number, words in enumerate((["parallelize.expert_dispatch=gathering"], [])):
        settings = ("mesh.ep=2", "training.steps=2", "training.seq_len=64", *words)
        plugin = ("-p", str(Path(__file__).with_name("gathering.py")))
        run = tmp_path / str(number)
        done = run_cli("train", "qwen3_moe_debug", *plugin, "--nproc", "2", "--run-dir", run, *settings)
        assert done.code == 0, done.stderr
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        losses.append([event["metrics"]["loss"] for event in events if event["event"] == "step"])
    assert len(losses[0]) == 2 and losses[0] == losses[1]
    lock = (tmp_path / "0" / "recipe.lock.toml").read_text()
    assert 'type = "gathering/gathering"' in lock


def test_an_unknown_dispatcher_is_refused_where_it_stands(tmp_path: Path) -> None:
    done = run_cli("validate", "qwen3_moe_debug", "parallelize.expert_dispatch=all_to_al", cwd=tmp_path)
    assert done.code == 4
    assert "all_to_al" in done.stderr and "did you mean" in done.stderr


def test_a_plan_computes_the_all_to_all_and_says_so() -> None:
    made = with_dispatcher(Layout({"dp_shard": 2, "ep": 2}, config=EIGHT), GatheringHere())
    planned, left_out = on_a_cpu(made)
    assert planned.parallelize.expert_dispatch == AllToAll()
    assert left_out == ["parallelize.expert_dispatch"]
    assert on_a_cpu(replace(planned, mesh=Mesh())) == (replace(planned, mesh=Mesh()), [])
