"""Pipeline schedules beside activation checkpointing and compile: the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.engine.cases import Layout, gradients
from tests.rows import rows
from titancli.layout.stages import SCHEDULES

pytestmark = pytest.mark.ranks

BY_OP = {"mode": "selective"}
WHOLE = [name for name, kind in SCHEDULES.items() if not kind.splits_backward]
CASES: dict[str, dict[str, Any]] = {
    **{f"{name}, AC full": dict(schedule=name, activation_checkpoint={"mode": "full"}) for name in WHOLE},
    **{f"{name}, AC by op": dict(schedule=name, activation_checkpoint=BY_OP) for name in WHOLE},
    **{f"{name}, compiled": dict(schedule=name, compile="aot_eager") for name in WHOLE},
}


@pytest.fixture(scope="module")
def expected(ranks: Any) -> dict[str, Tensor]:
    (found,) = ranks(1, gradients, Layout())
    return found


QUICK = {
    "GPipe, AC full",
    "1F1B, AC by op",
    "Interleaved1F1B, AC full",
    "LoopedBFS, AC by op",
    "1F1B, compiled",
}
"""Each schedule once, and each way to recompute with one stage a rank and with two."""


@pytest.mark.parametrize("name", rows(CASES, slow=CASES.keys() - QUICK))
def test_stages_that_recompute_give_the_same_gradients(
    ranks: Any, expected: dict[str, Tensor], name: str
) -> None:
    settings = dict(CASES[name])
    layout = Layout(mesh={"pp": 2}, pipeline={"schedule": settings.pop("schedule")}, **settings)
    found = {key: tensor for part in ranks(2, gradients, layout) for key, tensor in part.items()}
    assert set(found) == set(expected)
    for key, reference in expected.items():
        if key != "loss_max":  # of one rank, where there is one
            assert (found[key] - reference).norm() <= 1e-5 * reference.norm(), key
