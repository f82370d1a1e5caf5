"""Advantages: how much better each sample is than the others of its prompt, or of its step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import titan_rl as rl

EPSILON = 1e-4
"""Constant added to a standard deviation."""


class _Advantage:
    def __init__(self, config: Any = None) -> None:
        """Take the config, which has no fields."""


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


class GlobalNorm(_Advantage):
    """(d − mean(d)) / (std(d) + 1e-4) over all samples of the step, d = r or r − the mean of its group; the
    standard deviation with n − 1."""

    def __init__(self, config: rl.GlobalNorm) -> None:
        self._group_mean = config.group_mean

    def __call__(self, rewards: Tensor, counted: Tensor) -> Tensor:
        found = _centred(rewards, counted)[0] if self._group_mean else rewards
        centred, number = _centred(found.view(1, -1), counted.view(1, -1))
        deviation = (centred.square().sum() / (number - 1).clamp(min=1)).sqrt()
        return (centred / (deviation + EPSILON)).view_as(rewards)


def _centred(rewards: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rewards minus the group's mean over those that count, [G, N], 0 for the others; and the
    number that count, [G, 1]."""
    number = counted.sum(1, keepdim=True)
    kept = torch.where(counted, rewards, 0.0)
    mean = kept.sum(1, keepdim=True) / number.clamp(min=1)
    return torch.where(counted, rewards - mean, 0.0), number
