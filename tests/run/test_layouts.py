"""One run that is resumed on another layout again and again: whole runs, with their data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished, losses
from titancli.checkpoint import read_manifest

pytestmark = pytest.mark.ranks

STEPS = 5
LAYOUTS = {
    "FSDP2": (2, 1, 1),
    "FSDP4": (4, 1, 1),
    "TP2": (2, 2, 1),
    "FSDP2xTP2": (4, 2, 1),
    "PP2": (2, 1, 2),
    "one rank": (1, 1, 1),
}
"""Ranks, tp and pp; the other ranks are dp_shard."""
CHAINS = (("FSDP2", "TP2", "one rank"), tuple(LAYOUTS))
WITHIN = 1e-5
RECIPE = (
    "model.n_layers=4",
    "training.global_batch_size=8",
    "optimizer.eps=1e-4",  # or the rounding of a gradient near zero would move its weight
    f"checkpoint.interval={STEPS}",
    "checkpoint.keep_latest_k=0",
)


@pytest.mark.parametrize(
    "chain", [CHAINS[0], pytest.param(CHAINS[1], marks=pytest.mark.slow)], ids=["three", "all"]
)
def test_a_run_goes_from_layout_to_layout_with_the_same_data_and_losses(
    train_on: Callable[..., Finished],
    reference: Any,
    here: Path,
    record_property: Callable[[str, object], None],
    chain: tuple[str, ...],
) -> None:
    record_property("relayout", {"chain": list(chain), "within": WITHIN})
    total = STEPS * len(chain)
    recipe = (*RECIPE, f"lr_scheduler.total_steps={total}")
    expected, whole = reference(1, *recipe, f"training.steps={total}")
    begin: tuple[str, ...] = ("tiny.toml", "--run-dir", "r", *recipe)
    for number, name in enumerate(chain, start=1):
        ranks, tp, pp = LAYOUTS[name]
        degrees = (f"mesh.tp={tp}", f"mesh.pp={pp}", f"training.steps={number * STEPS}")
        done = train_on(ranks, *begin, *degrees)
        assert done.code == 0, done.err
        assert losses(here / "r") == pytest.approx(
            {step: expected[step] for step in range(1, number * STEPS + 1)}, rel=WITHIN
        ), name
        states = [
            read_manifest(run / f"checkpoints/step-{number * STEPS}").state for run in (here / "r", whole)
        ]
        assert states[0]["data"] == states[1]["data"], name
        assert states[0]["engine"]["tokens_seen"] == states[1]["engine"]["tokens_seen"], name
        begin = ("r", "--resume")
