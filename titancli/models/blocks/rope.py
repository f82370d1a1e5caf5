"""Rotary position embedding, with Llama 3.1's frequency scaling.

Source: RoFormer (arXiv 2104.09864); scaling as in Meta's Llama 3.1 release. Pairs are (i, i + head_dim/2),
the order of Hugging Face checkpoints, so that no permutation of q and k is needed on the way in or out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from titancli.models import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """[head_dim / 2] fp32 on the CPU: radians per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    # 0 for wavelengths longer than `low` (stretched), 1 for those shorter than `high` (kept), linear between.
    keep = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    stretched = torch.where(wavelengths > low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < high, frequencies, stretched)


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle.

    Args:
        positions: [B, S] or [1, S] int64.
        frequencies: [head_dim / 2] fp32.

    Returns:
        Two fp32 tensors [B, S, 1, head_dim / 2].
    """
    angles = positions[..., None].float() * frequencies
    return angles.cos()[:, :, None, :], angles.sin()[:, :, None, :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, S, heads, head_dim], computed in fp32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
