"""`titan train` with experts on two ranks, and the rest of the run on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Command, Finished, losses

pytestmark = pytest.mark.e2e

RECIPE = """\
extends = ["titan:qwen3_moe_debug", "tiny.toml"]
name = "experts"
[model]
type = "qwen3"
flavor = "debugmodel_moe"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim = 8
moe = { num_experts = 4, top_k = 2, hidden_dim = 16 }
[lr_scheduler]
total_steps = 6
"""


def test_experts_on_two_ranks_are_those_of_one(
    command: Callable[..., Command], train: Callable[..., Finished], here: Path
) -> None:
    (here / "experts.toml").write_text(RECIPE)
    done = train("experts.toml", "--run-dir", "one", "training.local_batch_size=4")
    assert done.code == 0, done.err
    spread = ("launcher.nproc=2", "mesh.ep=2")
    done = command("experts.toml", *spread, "training.steps=4", "--run-dir", "two").wait()
    assert done.code == 0, done.err
    assert "2 ranks (dp_shard 2, ep 2)" in done.err
    alone = ("launcher.nproc=1", "mesh.ep=1", "training.local_batch_size=4", "training.steps=6")
    done = train("two", "--resume", *alone)
    assert done.code == 0, done.err
    expected, found = losses(here / "one"), losses(here / "two")
    assert found.keys() == expected.keys() == set(range(1, 7))
    assert found == pytest.approx(expected, rel=1e-4)
