"""The policy losses against a few lines of NumPy, and their gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from titan_rl import Cispo, Grpo, Gspo, ImportanceSampling
from titancli.protocols.batch import Batch
from titancli.registry.component import build

KL = 0.3
CASES = {
    "grpo": Grpo(),
    "grpo kl": Grpo(kl_coef=KL),
    "dapo": Grpo(clip_high=0.28, length_norm="token"),
    "dr. grpo": Grpo(length_norm="constant", constant=7),
    "gspo": Gspo(clip_low=0.1, clip_high=0.15),
    "gspo whole": Gspo(clip_low=0.4, clip_high=0.4, per_token=False),
    "gspo kl": Gspo(clip_low=0.1, clip_high=0.15, kl_coef=KL),
    "cispo": Cispo(clip_high=0.2),
    "importance_sampling": ImportanceSampling(),
    "grpo entropy": Grpo(entropy_coef=0.05),
    "grpo dual clip": Grpo(delta=1.3),
    "gspo dual clip": Gspo(clip_low=0.1, clip_high=0.15, delta=1.2),
    "grpo token_truncate": Grpo(importance="token_truncate", importance_max=1.1, kl_coef=KL),
    "dapo token_mask": Grpo(length_norm="token", importance="token_mask", importance_max=1.2),
    "gspo sequence_truncate": Gspo(importance="sequence_truncate", importance_max=1.5),
    "cispo sequence_mask": Cispo(clip_high=0.2, importance="sequence_mask", importance_max=1.5),
}
ROWS, LENGTH = 3, 12
SAMPLES = [(0, 2, 5), (0, 6, 7), (0, 8, 12), (1, 0, 9), (2, 3, 11)]
"""Of each sample its row, and where what was drawn begins and ends; one token long at least."""
ADVANTAGES = [1.3, -0.7, 0.4, -1.1, 2.0]


def problem(seed: int = 0) -> tuple[torch.Tensor, Batch]:
    """Log-probabilities, float64, and a batch whose rows hold several samples; elsewhere stands rubbish."""
    generator = torch.Generator().manual_seed(seed)
    out = -2 * torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    tensors = {
        "targets": torch.full((ROWS, LENGTH), -100),
        "document_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int32),
        "advantages": torch.full((ROWS, LENGTH), torch.nan, dtype=torch.float64),
        "old_logprobs": out + 0.4 * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64),
        "reference_logprobs": out + 0.4 * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64),
        "sampler_logprobs": out + 0.4 * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64),
        "entropy": 3 * torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64),
    }
    for number, ((row, start, end), advantage) in enumerate(zip(SAMPLES, ADVANTAGES, strict=True)):
        tensors["targets"][row, start:end] = 5
        tensors["document_ids"][row, max(0, start - 1) :] = number if row == 0 else 0
        tensors["advantages"][row, start:end] = advantage
    out = torch.where(tensors["targets"] == -100, 0.0, out)
    return out.requires_grad_(), Batch(tensors)


def reference(
    name: str, config, out: torch.Tensor, batch: Batch, held: torch.Tensor | None = None
) -> tuple[float, float]:
    """Return the loss's sum and weight; `held` are the log-probabilities of a ratio without gradient."""
    total, tokens = 0.0, 0
    for (row, start, end), a in zip(SAMPLES, ADVANTAGES, strict=True):
        log_probs = [batch[f"{key}_logprobs"] for key in ("old", "reference", "sampler")]
        read = [x[row, start:end].detach().numpy() for x in (out, *log_probs, batch["entropy"])]
        new, old, ref, sampler, entropy = read
        r = np.exp(new - old)
        if name.startswith("gspo"):
            r = np.full_like(r, np.exp((np.mean if config.per_token else np.sum)(new - old)))
        if name.startswith("cispo"):
            fixed = new if held is None else held[row, start:end].detach().numpy()
            objective = np.minimum(np.exp(fixed - old), 1 + config.clip_high) * a * new
        elif name == "importance_sampling":
            objective = r * a
        else:
            objective = np.minimum(r * a, np.clip(r, 1 - config.clip_low, 1 + config.clip_high) * a)
            if config.delta is not None and a < 0:
                objective = np.maximum(objective, config.delta * a)
        if config.importance != "none":
            level, how = config.importance.split("_")
            w = old - sampler
            w = np.exp(w if level == "token" else np.full_like(w, w.sum()))
            most = config.importance_max
            objective = objective * (np.minimum(w, most) if how == "truncate" else np.where(w > most, 0.0, w))
        kl = np.exp(ref - new) - (ref - new) - 1
        loss = -objective - config.entropy_coef * entropy + config.kl_coef * kl
        norm = getattr(config, "length_norm", "sample" if name.startswith("gspo") else "token")
        total += loss.sum() / {"sample": end - start, "token": 1, "constant": 7}[norm]
        tokens += end - start
    return total, tokens if norm == "token" else len(SAMPLES)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_equals_the_reference(name: str) -> None:
    out, batch = problem()
    result = build(CASES[name])(out, batch)
    expected, weight = reference(name, CASES[name], out, batch)
    assert result.sum.item() == pytest.approx(expected, rel=1e-6)
    assert result.weight.item() == weight


@pytest.mark.parametrize("name", CASES)
def test_its_gradient_equals_finite_differences(name: str) -> None:
    """The ratio of cispo has no gradient."""
    out, batch = problem()
    config = CASES[name]
    (gradient,) = torch.autograd.grad(build(config)(out, batch).sum, out)

    def value(x: torch.Tensor) -> float:
        return reference(name, config, x, batch, held=out)[0]

    for place in (batch["targets"] != -100).nonzero().tolist():
        step = torch.zeros_like(out)
        step[tuple(place)] = 1e-6
        slope = (value(out.detach() + step) - value(out.detach() - step)) / 2e-6
        assert gradient[tuple(place)].item() == pytest.approx(slope, rel=1e-4, abs=1e-6)
    assert not gradient[batch["targets"] == -100].any()


def test_the_metrics_are_averages_of_what_was_drawn() -> None:
    out, batch = problem()
    entropy = torch.rand(ROWS, LENGTH, dtype=torch.float64)
    result = build(Grpo(length_norm="token", kl_coef=KL))(out, Batch({**batch, "entropy": entropy}))
    drawn = batch["targets"] != -100
    log_ratio = (out.detach() - batch["old_logprobs"])[drawn].numpy()
    r, a = np.exp(log_ratio), batch["advantages"][drawn].numpy()
    away = (out.detach() - batch["reference_logprobs"])[drawn].numpy()
    expected = {
        "ratio": r.mean(),
        "clip_fraction": (((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8))).mean(),
        "sampler_k1": -log_ratio.mean(),
        "sampler_k3": (r - 1 - log_ratio).mean(),
        "reference_kl": (np.exp(-away) - 1 + away).mean(),
        "entropy": entropy[drawn].mean().item(),
    }
    found = {name: (value / result.weight).item() for name, value in result.metrics.items()}
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("number", [LENGTH, -1, 2**31 - 1, -(2**40)])
def test_documents_may_have_any_ids(name: str, number: int) -> None:
    out, batch = problem()
    loss, ids = build(CASES[name]), batch["document_ids"].long()
    other = torch.where(ids == 1, number, ids)
    found = loss(out, Batch({**batch, "document_ids": other if abs(number) >> 31 else other.int()}))
    expected = loss(out, batch)
    assert (found.sum, found.weight, found.metrics) == (expected.sum, expected.weight, expected.metrics)


@pytest.mark.parametrize("name", CASES)
def test_rows_with_nothing_drawn_change_nothing(name: str) -> None:
    """They fill up the last micro-batch of a rank."""
    out, batch = problem()
    empty = {**{key: torch.full_like(x, torch.nan) for key, x in batch.items() if x.is_floating_point()}}
    empty |= {"targets": torch.full((ROWS, LENGTH), -100), "document_ids": batch["document_ids"]}
    more = Batch({key: torch.cat((x, empty[key])) for key, x in batch.items()})
    loss = build(CASES[name])
    alone, together = loss(out, batch), loss(torch.cat((out, torch.zeros_like(out))), more)
    assert (alone.sum, alone.weight) == (together.sum, together.weight)
    (gradient,) = torch.autograd.grad(together.sum, out)
    assert torch.isfinite(gradient).all()
    none = loss(
        torch.zeros_like(out).requires_grad_(), Batch(empty | {"old_logprobs": torch.zeros_like(out)})
    )
    assert (none.sum, none.weight) == (0, 0)
