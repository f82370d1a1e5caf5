"""How tokens are drawn, beside transformers' processors and the plainest code for each."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from titancli.protocols.samples import SamplingParams
from titancli.rl.sampling import choose, draw, keep_top_k, keep_top_p, probabilities, uniforms

LOGITS = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("k", [1, 7, 50, 1000])
def test_top_k_keeps_the_k_greatest(k: int) -> None:
    kept = keep_top_k(LOGITS, k)
    assert torch.equal(kept, TopKLogitsWarper(k)(None, LOGITS))
    for row, found in zip(LOGITS, kept, strict=True):
        best = sorted(range(50), key=lambda i: -row[i])[:k]
        assert [i for i in range(50) if found[i] != -torch.inf] == sorted(best)


def test_top_k_keeps_exactly_k_of_equal_ones() -> None:
    assert int((keep_top_k(torch.zeros(1, 9), 4) > -torch.inf).sum()) == 4


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_fewest_that_reach_p(p: float) -> None:
    kept = keep_top_p(LOGITS, p)
    assert torch.equal(kept, TopPLogitsWarper(p)(None, LOGITS))
    for row, found in zip(LOGITS.double().softmax(-1), kept, strict=True):
        total, best = 0.0, []
        for i in sorted(range(50), key=lambda i: -row[i]):
            best.append(i)
            total += float(row[i])
            if total >= p:
                break
        assert [i for i in range(50) if found[i] != -torch.inf] == sorted(best)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=0.9, top_p=0.8),
        SamplingParams(temperature=2.0, top_k=20, top_p=0.5),
    ],
    ids=str,
)
def test_probabilities_equal_those_of_transformers_in_its_order(sampling: SamplingParams) -> None:
    logits = LOGITS
    if sampling.temperature != 1:
        logits = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k is not None:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    torch.testing.assert_close(probabilities(LOGITS, sampling), logits.softmax(-1), atol=1e-6, rtol=1e-5)


def test_a_small_temperature_is_greedy_and_finite() -> None:
    found = probabilities(LOGITS, SamplingParams(temperature=0.001))
    assert torch.isfinite(found).all()
    assert torch.equal(found.argmax(-1), LOGITS.argmax(-1))
    assert torch.equal(choose(LOGITS, SamplingParams(temperature=0.0), torch.zeros(6)), LOGITS.argmax(-1))


def test_top_k_of_one_is_greedy() -> None:
    for number in (0.0, 0.5, 1 - 2**-53):
        uniform = torch.full((6,), number, dtype=torch.float64)
        assert torch.equal(
            choose(LOGITS, SamplingParams(temperature=1.0, top_k=1), uniform), LOGITS.argmax(-1)
        )


def test_a_number_draws_the_token_that_the_sum_passes() -> None:
    row = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for number, token in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-53, 4)]:
        assert draw(row, torch.tensor([number], dtype=torch.float64)).item() == token


def test_tokens_come_as_often_as_they_should() -> None:
    count = 20_000
    row = probabilities(LOGITS[:1], SamplingParams(temperature=1.5))
    drawn = draw(row.expand(count, -1), uniforms(3, count))
    found = torch.bincount(drawn, minlength=50) / count
    # five standard deviations of each
    assert bool(((found - row[0]).abs() <= 5 * (row[0] * (1 - row[0]) / count).sqrt() + 1e-9).all())


def test_numbers_follow_from_a_rows_own_seed_alone() -> None:
    first, second = uniforms(1, 40), uniforms(2, 40)
    assert first.dtype == torch.float64
    assert torch.equal(second, uniforms(2, 40))
    assert torch.equal(first[:3], uniforms(1, 3))
    assert not torch.equal(first, second)
