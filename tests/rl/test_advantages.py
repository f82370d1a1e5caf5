from __future__ import annotations

import numpy as np
import pytest
import torch

from titancli.registry.component import build
from titancli.rl import GroupMean, GroupNorm, LeaveOneOut

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
    """Of those that count; one alone, and samples that are all alike, have none."""
    found = build(config)(REWARDS.double(), COUNTED)
    for rewards, counted, row in zip(REWARDS.double(), COUNTED, found, strict=True):
        np.testing.assert_allclose(
            row[counted].numpy(), reference(rewards[counted].numpy()), rtol=1e-12, atol=1e-15
        )
        assert not row[~counted].any()
    assert not found[1].any() and not found[3].any()
