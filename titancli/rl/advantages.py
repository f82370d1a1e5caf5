"""Advantages: by how much each sample did better than the others of its prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to a standard deviation."""


class _Advantage:
    def __init__(self, config: Any = None) -> None:
        """The config has no fields."""


class GroupMean(_Advantage):
    """r − mean(r)."""

    def __call__(self, rewards: Tensor, counted: Tensor) -> Tensor:
        return _centred(rewards, counted)[0]


class GroupNorm(_Advantage):
    """(r − mean(r)) / (std(r) + 1e-4), the standard deviation with n − 1."""

    def __call__(self, rewards: Tensor, counted: Tensor) -> Tensor:
        centred, number = _centred(rewards, counted)
        deviation = (centred.square().sum(1, keepdim=True) / (number - 1).clamp(min=1)).sqrt()
        return centred / (deviation + EPSILON)


class LeaveOneOut(_Advantage):
    """r − the mean of the others: n / (n − 1) · (r − mean(r))."""

    def __call__(self, rewards: Tensor, counted: Tensor) -> Tensor:
        centred, number = _centred(rewards, counted)
        return centred * number / (number - 1).clamp(min=1)


def _centred(rewards: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """[G, N] less the group's mean over those that count, 0 for the others; and how many count, [G, 1]."""
    number = counted.sum(1, keepdim=True)
    kept = torch.where(counted, rewards, 0.0)
    mean = kept.sum(1, keepdim=True) / number.clamp(min=1)
    return torch.where(counted, rewards - mean, 0.0), number
