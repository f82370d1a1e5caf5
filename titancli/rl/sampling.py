"""From logits to a token: pure functions, the same for `titan generate` and for rollouts.

In order: temperature, top-k, top-p (as in transformers), softmax, and one uniform number a token, made on the
CPU, so that what is drawn depends neither on the device nor on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titancli.errors import TitanError


@dataclass(frozen=True)
class Sampling:
    """The options of sampling.

    Raises:
        TitanError: a number is out of its range.
    """

    temperature: float = 1.0
    """Logits are divided by this; 0: the most probable token always."""
    top_k: int | None = None
    """Only so many most probable tokens; None: all."""
    top_p: float = 1.0
    """Nucleus: the fewest of the most probable tokens that reach this probability together."""

    def __post_init__(self) -> None:
        for name, value, fits, range_ in (
            (
                "temperature",
                self.temperature,
                0 <= self.temperature < math.inf,
                "0 (the most probable) or more",
            ),
            (
                "top_k",
                self.top_k,
                self.top_k is None or (type(self.top_k) is int and self.top_k >= 1),
                "an integer of 1 or more, or None for all tokens",
            ),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not fits:
                raise TitanError(f"sampling: {name} is {value}", hint=f"it is {range_}")


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """[..., V] with -inf for all but the k greatest (exactly k, whatever is equal)."""
    values, indices = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return torch.full_like(logits, float("-inf")).scatter(-1, indices, values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """[..., V] with -inf for all but the fewest whose probabilities add up to p or more; at least one.

    Source: nucleus sampling, arXiv 1904.09751.
    """
    ordered, indices = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1, dtype=torch.float32)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    before[..., 0] = -1.0  # the first stays, whatever p is
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, before >= p)
    return logits.masked_fill(dropped, float("-inf"))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution to sample from, [..., V] fp32, for logits [..., V] and a temperature above
    0."""
    logits = logits.float()
    # The greatest becomes 0, so that a small temperature makes no infinite number.
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return logits.softmax(-1)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the sum of probabilities [B, V] passes a number in [0, 1), one a row.

    Args:
        uniform: [B] float64.

    Returns:
        [B] int64. A token of probability 0 is never drawn.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    wanted = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp(max=probabilities.shape[-1] - 1)


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """The next token of each row, [B] int64, for logits [B, V] and numbers in [0, 1), [B] float64."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return draw(probabilities(logits, sampling), uniform)


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Numbers in [0, 1) on the CPU, [len(seeds), count] float64; a row follows from its own seed alone."""
    rows = [torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in seeds]
    return torch.stack(rows)
