"""The loss dpo against five lines of NumPy, and its gradient against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from titan_preference import DPO
from titancli.errors import TitanError
from titancli.protocols.batch import IGNORE, Batch
from titancli.registry.component import build

BETA = 0.3


def problem() -> tuple[torch.Tensor, Batch]:
    """Three pairs of which the last has no targets, in float64."""
    generator = torch.Generator().manual_seed(0)
    out = -torch.rand(6, 9, generator=generator, dtype=torch.float64)
    targets = torch.full((6, 9), IGNORE)
    for row, (start, end) in enumerate([(2, 9), (2, 5), (0, 1), (3, 8)]):
        targets[row, start:end] = 1
    out = torch.where(targets == IGNORE, 0.0, out)
    reference = -3 * torch.rand(6, generator=generator, dtype=torch.float64)
    return out, Batch({"targets": targets, "reference_row_logprobs": reference}, unit=2)


def reference(out: np.ndarray, expected: np.ndarray, smoothing: float) -> float:
    """Return the sum over both pairs."""
    gained = BETA * (out.sum(1) - expected)
    z = gained[0:4:2] - gained[1:4:2]
    p = 1 / (1 + np.exp(-z))
    return float((-(1 - smoothing) * np.log(p) - smoothing * np.log(1 - p)).sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_is_what_numpy_says_and_so_is_its_gradient(smoothing: float) -> None:
    out, batch = problem()
    loss = build(DPO(beta=BETA, label_smoothing=smoothing))
    out.requires_grad_()
    found = loss(out, batch)
    found.sum.backward()
    values, expected = out.detach().numpy().copy(), batch["reference_row_logprobs"].numpy()
    assert found.sum.item() == pytest.approx(reference(values, expected, smoothing), rel=1e-10)
    assert float(found.weight) == 2.0
    slopes = np.zeros_like(values)
    for place in np.ndindex(values.shape):
        for sign in (1, -1):
            moved = values.copy()
            moved[place] += sign * 1e-6
            slopes[place] += sign * reference(moved, expected, smoothing) / 2e-6
    # All places of a row count alike, those without a target too; the engine's log-probs are constant there.
    np.testing.assert_allclose(out.grad.numpy(), slopes, atol=1e-8)
    assert not slopes[4:].any()


def test_metrics_are_sums_over_pairs() -> None:
    out, batch = problem()
    metrics = build(DPO(beta=BETA))(out, batch).metrics
    gained = (BETA * (out.sum(1) - batch["reference_row_logprobs"]))[:4]
    assert float(metrics["reward_chosen"]) == pytest.approx(float(gained[0] + gained[2]))
    assert float(metrics["reward_rejected"]) == pytest.approx(float(gained[1] + gained[3]))
    margins = gained[0::2] - gained[1::2]
    assert float(metrics["reward_margin"]) == pytest.approx(float(margins.sum()))
    assert float(metrics["reward_accuracy"]) == float((margins > 0).sum())


def test_what_is_missing_is_named() -> None:
    out, batch = problem()
    loss = build(DPO())
    with pytest.raises(TitanError, match="no 'reference_row_logprobs'; it has targets"):
        loss(out, Batch({"targets": batch["targets"]}))
    with pytest.raises(TitanError, match="needs pairs of rows, but got 3"):
        loss.check_batch(Batch({"targets": batch["targets"][:3]}))


def test_what_stands_beside_no_pair_is_not_read() -> None:
    out, batch = problem()
    reference = torch.where(torch.arange(len(out)) < 4, batch["reference_row_logprobs"], torch.nan)
    loss = build(DPO())
    expected, found = loss(out, batch), loss(out, Batch({**batch, "reference_row_logprobs": reference}))
    assert (found.sum, found.metrics) == (expected.sum, expected.metrics)
