"""Advantages per token: generalized advantage estimation, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from titancli import Sample

if TYPE_CHECKING:
    from titan_ppo import Gae as Config

EPSILON = 1e-8
"""Constant added to the variance."""


class Gae:
    """The advantage `gae`."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, rewards: Tensor, counted: Tensor) -> Tensor:
        """Return the rewards, which `of_tokens` deals to tokens."""
        return torch.where(counted, rewards, 0.0)

    def of_tokens(self, samples: list[Sample], over_ranks: Callable[[Tensor], Tensor]) -> list[Sample]:
        """Return the samples with their advantages, and with `returns`: the advantages before they are
        whitened, plus the values."""
        drawn = [_array(sample.mask) > 0 for sample in samples]
        for mask in drawn:
            mask[0] = False  # no token precedes it
        values = _padded([_array(s.extra["old_values"])[m] for s, m in zip(samples, drawn, strict=True)])
        rewards = _padded([self._rewards(s, m) for s, m in zip(samples, drawn, strict=True)])
        found = gae(rewards, values, self.config.gamma, self.config.lam)
        there = _padded([np.ones(m.sum()) for m in drawn]) > 0
        returns, found = found + values, np.where(there, found, 0.0)
        if self.config.whiten:
            found = whitened(found, there, over_ranks)
        return [
            replace(
                sample,
                advantages=_placed(found[number], mask),
                extra={**sample.extra, "returns": _placed(returns[number], mask)},
            )
            for number, (sample, mask) in enumerate(zip(samples, drawn, strict=True))
        ]

    def _rewards(self, sample: Sample, drawn: Any) -> Any:
        """Return the reward of each drawn token: the sample's at the last, minus the penalty of each."""
        rewards = np.zeros(drawn.sum())
        if self.config.kl_coef > 0:
            rewards -= self.config.kl_coef * (_array(sample.logprobs) - _array(sample.reference))[drawn]
        rewards[-1:] += float(sample.advantages)  # type: ignore[arg-type]  # the call returned one number
        return rewards


def gae(rewards: Any, values: Any, gamma: float, lam: float) -> Any:
    """Return Σ (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} − V_t, [N, T] float64; what follows the last token
    has the value 0.

    Args:
        rewards, values: [N, T] float64, 0 after the end.
    """
    found = np.zeros_like(values)
    later, following = np.zeros(len(values)), np.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        later = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * later
        found[:, t], following = later, values[:, t]
    return found


def whitened(x: Any, there: Any, over_ranks: Callable[[Tensor], Tensor]) -> Any:
    """Return x with mean 0 and variance 1 (with n − 1) over all ranks, and 0 where nothing is. Collective."""
    count, total = over_ranks(torch.tensor([there.sum(), x[there].sum()], dtype=torch.float64)).tolist()
    centred = np.where(there, x - total / max(count, 1.0), 0.0)
    square = over_ranks(torch.tensor([np.square(centred).sum()], dtype=torch.float64)).item()
    return centred / np.sqrt(square / max(count - 1.0, 1.0) + EPSILON)


def _array(numbers: Any) -> Any:
    return np.array(
        numbers.detach().cpu().numpy() if isinstance(numbers, Tensor) else numbers, dtype=np.float64
    )


def _padded(rows: list[Any]) -> Any:
    found = np.zeros((len(rows), max(map(len, rows), default=0)))
    for number, row in enumerate(rows):
        found[number, : len(row)] = row
    return found


def _placed(numbers: Any, drawn: Any) -> Any:
    found = np.zeros(len(drawn))
    found[drawn] = numbers[: drawn.sum()]
    return found
