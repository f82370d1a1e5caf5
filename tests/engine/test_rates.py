"""The learning rate of a step, as a script gives it: groups keep their ratio, and NaN is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.test_library import TINY, batch
from titancli import Engine, TitanError
from titancli.engine.optimizer_state import keep_peaks, set_rates
from titancli.models import Llama3
from titancli.optimizers import AdamW


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Of two groups, the second of which has a peak of its own, as AdamW has beside Muon."""
    with Engine.of(Llama3(**TINY), optimizer=AdamW(lr=0.02, no_decay=["*norm.weight"])) as made:
        assert made.optimizer is not None
        made.optimizer.param_groups[1]["initial_lr"] = 1e-3
        made.forward_backward(batch())
        yield made


def rates(engine: Engine) -> set[float]:
    assert engine.optimizer is not None
    return {group["lr"] for group in engine.optimizer.param_groups}


def test_groups_keep_their_ratio_to_the_recipes_rate(engine: Engine) -> None:
    assert engine.optim_step(lr=0.01)["lr"] == 0.01
    assert rates(engine) == {0.01, 0.0005}
    engine.forward_backward(batch())
    assert engine.optim_step()["lr"] == 0.02
    assert rates(engine) == {0.02, 0.001}


def test_a_stage_without_the_first_kind_of_parameters_keeps_the_recipes_ratio() -> None:
    """Under a pipeline a stage may have vectors alone, and then the fallback alone."""
    fallback = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    keep_peaks(fallback, 0.02)
    assert set_rates(fallback, 0.01, 1.0) == 0.01
    assert fallback.param_groups[0]["lr"] == pytest.approx(5e-4)
    assert set_rates(fallback, None, 0.5) == 0.01
    assert fallback.param_groups[0]["lr"] == pytest.approx(5e-4)


@pytest.mark.parametrize(
    "lr",
    [
        10**400,
        math.nan,
        math.inf,
        -1e-3,
        torch.tensor(math.nan),
        np.float32("nan"),
        "1e-3",
        True,
        torch.ones(2),
    ],
)
def test_a_rate_that_is_no_finite_number_is_refused_before_anything_moves(engine: Engine, lr: Any) -> None:
    before = [p.detach().clone() for _, p in engine.named_parameters()]
    with pytest.raises(TitanError, match=r"optim_step\(lr\)"):
        engine.optim_step(lr=lr)
    assert engine.status["step"] == 0 and engine.status["accumulated"] == 1
    assert all(torch.equal(p, old) for (_, p), old in zip(engine.named_parameters(), before, strict=True))
    norm = engine.optim_step(lr=torch.tensor(1e-3))["grad_norm"]  # the gradients were not divided yet
    engine.clear_gradients()
    with Engine.of(Llama3(**TINY)) as other:
        other.forward_backward(batch())
        torch.testing.assert_close(norm, other.optim_step()["grad_norm"])


@pytest.mark.parametrize(("peak", "factor"), [(math.inf, 1.0), (1e-3, math.nan), (1e-3, -0.5)])
def test_a_recipe_whose_rate_is_no_finite_number_is_refused(peak: float, factor: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=peak)
    keep_peaks(optimizer, peak)
    with pytest.raises(TitanError, match="the recipe's learning rate is"):
        set_rates(optimizer, None, factor)


def test_a_ratio_to_nothing_is_refused() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.0, 1e-3)]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    keep_peaks(optimizer, 0.0)
    with pytest.raises(TitanError, match="no ratio to keep"):
        set_rates(optimizer, 0.1, 1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 1e-3]
