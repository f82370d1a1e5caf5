"""From logits to a token: pure functions, shared by `titan generate` and rollouts.

In order: temperature, top-k, top-p (as in transformers), softmax, and one uniform number per token, made on
the CPU, so that the random numbers depend neither on the device nor on the rest of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titancli.protocols.samples import SamplingParams


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Return logits, [..., V], with -inf for all but the k largest (exactly k, even with ties)."""
    values, indices = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return torch.full_like(logits, float("-inf")).scatter(-1, indices, values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Return logits, [..., V], with -inf for all but the fewest most probable tokens whose probabilities sum
    to p or more; at least one.

    Source: nucleus sampling, arXiv 1904.09751.
    """
    ordered, indices = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1, dtype=torch.float32)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    before[..., 0] = -1.0  # always keep the first
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, before >= p)
    return logits.masked_fill(dropped, float("-inf"))


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution to sample from, [..., V] fp32, for logits [..., V] and a temperature above
    0."""
    logits = logits.float()
    # The maximum becomes 0, so that a small temperature does not overflow.
    logits = (logits - logits.amax(-1, keepdim=True)) / params.temperature
    if params.top_k is not None:
        logits = keep_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = keep_top_p(logits, params.top_p)
    return logits.softmax(-1)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at which the cumulative sum of probabilities, [B, V], exceeds a number in [0, 1), one
    per row.

    Args:
        uniform: [B] float64.

    Returns:
        [B] int64. A token of probability 0 is never sampled.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    wanted = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp(max=probabilities.shape[-1] - 1)


def choose(logits: Tensor, params: SamplingParams, uniform: Tensor) -> Tensor:
    """Return the next token of each row, [B] int64, for logits [B, V] and numbers in [0, 1), [B] float64."""
    if params.temperature == 0:
        return logits.argmax(-1)
    return draw(probabilities(logits, params), uniform)


def uniforms(seed: int, count: int) -> Tensor:
    """Return numbers in [0, 1) on the CPU, [count] float64; the first are the same whatever the count."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
