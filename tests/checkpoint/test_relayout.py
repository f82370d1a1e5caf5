"""A run goes on from layout to layout: after each change the losses are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import Layout, my_batches, recipe
from titancli.engine import Engine

pytestmark = pytest.mark.ranks

STEPS = 5
CHAIN: list[tuple[str, int, dict[str, int]]] = [
    ("FSDP2", 2, {"dp_shard": 2}),
    ("FSDP4", 4, {"dp_shard": 4}),
    ("TP2", 2, {"tp": 2}),
    ("FSDP2xTP2", 4, {"dp_shard": 2, "tp": 2}),
    ("PP2", 2, {"pp": 2}),
    ("one rank", 1, {}),
]


def _go_on(mesh: dict[str, int], before: str | None, after: str | None) -> list[float]:
    engine = Engine.build(recipe(Layout(mesh=mesh, pipeline={"microbatch_size": 4}), steps=100))
    if before is not None:
        engine.load(before)
    losses = []
    for step in range(engine.step, engine.step + STEPS):
        losses.append(engine.forward_backward(my_batches(engine, step))["loss"].item())
        engine.optim_step()
    if after is not None:
        engine.save(after)
    return losses


def test_each_layout_goes_on_where_the_one_before_it_stopped(ranks: Any, tmp_path: Path) -> None:
    before = None
    for number, (name, count, mesh) in enumerate(CHAIN):
        after = str(tmp_path / f"step-{(number + 1) * STEPS}")
        found = ranks(count, _go_on, mesh, before, after)
        [expected] = ranks(1, _go_on, {}, before, None)
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-5), name
        before = after
