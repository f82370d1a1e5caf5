"""The losses of pairs against NumPy and TRL's functions, on layouts, and through the installed commands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from titan_preference import Ipo, Orpo, Simpo
from titancli import IGNORE, Batch, build
from titancli.errors import TitanError

CASES = {"ipo": Ipo(beta=0.3), "simpo": Simpo(beta=2.5, gamma=0.8), "orpo": Orpo(beta=0.4)}
LENGTHS = [(5, 3), (1, 7), (4, 4)]
WIDTH = 9


def problem() -> tuple[torch.Tensor, Batch]:
    """Log-probabilities, float64; of the fourth pair only one answer is there, and rubbish beside it."""
    generator = torch.Generator().manual_seed(0)
    rows = 2 * len(LENGTHS) + 2
    lengths = torch.tensor([*(length for pair in LENGTHS for length in pair), 3, 0])
    targets = torch.where(torch.arange(WIDTH) < lengths[:, None], 5, IGNORE)
    out = -3 * torch.rand(rows, WIDTH, generator=generator, dtype=torch.float64) - 0.01
    out = torch.where(targets == IGNORE, 0.0, out)
    reference = out.sum(1) + torch.randn(rows, generator=generator, dtype=torch.float64)
    reference[-2:] = torch.nan
    return out.requires_grad_(), Batch({"targets": targets, "reference_row_logprobs": reference}, unit=2)


def by_hand(name: str, config: Any, out: torch.Tensor, batch: Batch) -> float:
    total, sums = 0.0, out.detach().numpy().sum(1)
    reference = batch["reference_row_logprobs"].numpy()
    for pair, lengths in enumerate(LENGTHS):
        rows = slice(2 * pair, 2 * pair + 2)
        means = (sums[rows] - (reference[rows] if name == "ipo" else 0)) / lengths
        gap = means[0] - means[1]
        if name == "ipo":
            total += (gap - 1 / (2 * config.beta)) ** 2
        elif name == "simpo":
            total += np.log1p(np.exp(-(config.beta * gap - config.gamma)))
        else:
            p = np.exp(means)
            odds = p / (1 - p)
            total += -means[0] + config.beta * np.log1p(odds[1] / odds[0])
    return total


@pytest.mark.parametrize("name", CASES)
def test_a_loss_equals_numpy_and_its_gradient_finite_differences(name: str) -> None:
    out, batch = problem()
    loss, config = build(CASES[name]), CASES[name]
    result = loss(out, batch)
    assert result.sum.item() == pytest.approx(by_hand(name, config, out, batch), rel=1e-9)
    assert result.weight.item() == len(LENGTHS)
    (gradient,) = torch.autograd.grad(result.sum, out)
    for row, column in (batch["targets"] != IGNORE).nonzero().tolist():
        step = torch.zeros_like(out)
        step[row, column] = 1e-6
        around = [by_hand(name, config, out.detach() + sign * step, batch) for sign in (1, -1)]
        assert gradient[row, column].item() == pytest.approx((around[0] - around[1]) / 2e-6, abs=1e-6)


def trls(name: str, config: Any, out: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean over pairs, by TRL's own function."""
    rows = 2 * len(LENGTHS)
    mask = batch["targets"][:rows] != IGNORE
    sums, lengths = out[:rows].sum(1), mask.sum(1)
    means = sums / lengths
    if name == "simpo":
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        them: Any = SimpleNamespace(
            loss_type="simpo",
            simpo_gamma=config.gamma,
            beta=config.beta,
            label_smoothing=0.0,
            alpha=0.0,
            accelerator=SimpleNamespace(device="cpu"),
        )
        return CPOTrainer.cpo_loss(them, means[0::2], means[1::2])[0].mean()
    if name == "orpo":
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

        them = SimpleNamespace(beta=config.beta, accelerator=SimpleNamespace(device="cpu"))
        ratio = ORPOTrainer.odds_ratio_loss(them, means[0::2], means[1::2])[0]
        return (-means[0::2] - ratio).mean()
    from trl.trainer.dpo_trainer import DPOTrainer

    # TRL has all chosen answers first, and nothing between the prompt and the first token of an answer.
    order = [*range(0, rows, 2), *range(1, rows, 2)]
    answers = torch.cat((torch.zeros(rows, 1, dtype=torch.bool), mask), 1)[order].long()
    stop = RuntimeError("the loss is known")

    class Metrics(dict):
        def __missing__(self, key: str) -> Any:
            raise stop

    found: list[torch.Tensor] = []
    model = SimpleNamespace(training=True)

    class Weight:
        """The weight of the loss in a sum, which is where its values can be seen."""

        def __rmul__(self, other: torch.Tensor) -> torch.Tensor:
            found.append(other)
            return other

    them = SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["ipo"],
        loss_weights=[Weight()],
        beta=config.beta,
        use_weighting=False,
        _metrics={"train": Metrics()},
    )
    outputs = SimpleNamespace(log_probs=out[:rows][order], entropy=torch.zeros(rows, WIDTH))
    reference = batch["reference_row_logprobs"][:rows]
    inputs = {
        "input_ids": answers,
        "completion_mask": answers,
        "ref_chosen_logps": reference[0::2],
        "ref_rejected_logps": reference[1::2],
    }
    with pytest.raises(RuntimeError, match="the loss is known"):
        DPOTrainer._compute_loss(them, lambda **kwargs: outputs, inputs, False)
    return found[0]


@pytest.mark.parametrize("name", CASES)
def test_a_loss_equals_trls(name: str) -> None:
    out, batch = problem()
    result = build(CASES[name])(out, batch)
    expected = trls(name, CASES[name], out, batch)
    torch.testing.assert_close(result.sum / result.weight, expected, rtol=1e-6, atol=1e-9)
    (ours,) = torch.autograd.grad(result.sum / result.weight, out)
    (theirs,) = torch.autograd.grad(expected, out)
    tolerance = 1e-6 if name == "orpo" else 1e-12  # TRL computes the odds in fp32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_no_pair_is_no_loss_and_a_certain_answer_is_finite(name: str) -> None:
    out, batch = problem()
    loss = build(CASES[name])
    none = Batch({**batch, "targets": torch.full_like(batch["targets"], IGNORE)})
    zeros = torch.zeros_like(out).requires_grad_()
    result = loss(zeros, none)
    (gradient,) = torch.autograd.grad(result.sum, zeros)
    assert (result.sum, result.weight) == (0, 0)
    assert not gradient.any()
    certain = torch.zeros_like(out).requires_grad_()  # every answer has probability 1
    result = loss(certain, batch)
    assert torch.isfinite(result.sum)
    assert torch.isfinite(torch.autograd.grad(result.sum, certain)[0]).all()


def test_rows_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(TitanError, match="the loss simpo needs pairs of rows, but got 1"):
        build(Simpo()).check_batch(Batch({"targets": torch.ones(1, 3, dtype=torch.long)}))
