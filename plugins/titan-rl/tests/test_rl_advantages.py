from __future__ import annotations

import numpy as np
import pytest
import torch

from titan_rl import GlobalNorm, GroupMean, GroupNorm, LeaveOneOut
from titancli.registry.component import build

REWARDS = torch.tensor(
    [[1.0, 0.0, 0.5, 2.0], [1.0, 1.0, 1.0, 1.0], [3.0, torch.nan, 1.0, 0.0], [2.0, 7.0, 7.0, 7.0]]
)
COUNTED = torch.tensor([[True] * 4, [True] * 4, [True, False, True, True], [True, False, False, False]])


def group_mean(r: np.ndarray) -> np.ndarray:
    return r - r.mean()


def group_norm(r: np.ndarray) -> np.ndarray:
    return (r - r.mean()) / ((r.std(ddof=1) if len(r) > 1 else 0.0) + 1e-4)


def leave_one_out(r: np.ndarray) -> np.ndarray:
    others = [np.delete(r, i) for i in range(len(r))]
    return np.array([r[i] - o.mean() if len(o) else 0.0 for i, o in enumerate(others)])


@pytest.mark.parametrize(
    ("config", "reference"),
    [(GroupMean(), group_mean), (GroupNorm(), group_norm), (LeaveOneOut(), leave_one_out)],
)
def test_an_advantage_equals_the_reference(config, reference) -> None:
    """Compare those that count; one alone, and samples that are all alike, have none."""
    found = build(config)(REWARDS.double(), COUNTED)
    for rewards, counted, row in zip(REWARDS.double(), COUNTED, found, strict=True):
        np.testing.assert_allclose(
            row[counted].numpy(), reference(rewards[counted].numpy()), rtol=1e-12, atol=1e-15
        )
        assert not row[~counted].any()
    assert not found[1].any() and not found[3].any()


@pytest.mark.parametrize("baseline", [False, True])
def test_global_norm_is_over_all_samples_of_the_step(baseline: bool) -> None:
    rewards = REWARDS.double()
    found = build(GlobalNorm(group_mean=baseline))(rewards, COUNTED)
    rows = [row[own].numpy() for row, own in zip(rewards, COUNTED, strict=True)]
    flat = np.concatenate([row - row.mean() if baseline else row for row in rows])
    expected = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(found[COUNTED].numpy(), expected, rtol=1e-12, atol=1e-15)
    assert not found[~COUNTED].any()
    alike = torch.full((2, 3), 0.7, dtype=torch.float64)
    assert build(GlobalNorm())(alike, torch.ones(2, 3, dtype=torch.bool)).abs().max() < 1e-9
    assert not build(GlobalNorm())(alike, torch.zeros(2, 3, dtype=torch.bool)).any()
