"""Heads on every layout give what they give on one rank."""

from __future__ import annotations

import pytest
from heads_cases import LOSSES, step
from torch import Tensor

from tests.engine.cases import Layout, small
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 3e-6) -> None:
    """Compare each tensor; a stage of a pipeline has some of them."""
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        assert (value - expected[name]).norm() <= tolerance * expected[name].norm() + 1e-8, name


@pytest.mark.parametrize("name", LOSSES)
def test_a_layout_changes_nothing(ranks: Ranks, name: str) -> None:
    alone = ranks(1, step, small(), name)[0]
    assert alone["loss"] == alone["evaluated"] > 0
    pp = {"microbatch_size": 8 if name == "embedding" else 4}
    halves = ranks(1, step, small(micro_batches=2), name)[0]
    if name != "embedding":  # whose negatives are those of a micro-batch
        compare(halves, alone)
    layouts: list[tuple[Layout, dict[str, Tensor]]] = [
        (small({"dp_shard": 2}), halves),
        (small({"tp": 2}), alone),
        (small({"cp": 2}), alone),
        (small({"pp": 2}, pipeline={**pp, "schedule": "GPipe"}), alone),
    ]
    for layout, expected in layouts:
        both = ranks(2, step, layout, name)
        assert both[0].keys() | both[1].keys() == expected.keys()
        for found in both:
            compare(found, expected)
