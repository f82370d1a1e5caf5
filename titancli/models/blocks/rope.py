"""Rotary position embedding, with Llama 3.1's and YaRN's scaling beyond the original context.

Source: RoFormer (arXiv 2104.09864); scaling as in Meta's Llama 3.1 release; YaRN (arXiv 2309.00071). Pairs
are (i, i + head_dim/2), the order of most Hugging Face checkpoints, so that q and k need no permutation on
import or export.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titancli.models.sections import LinearScaling, Yarn

if TYPE_CHECKING:
    from titancli.models.sections import RopeScaling
    from titancli.protocols.shape import Rope


def frequencies(rope: Rope) -> Tensor:
    """Return the frequencies, [dim / 2] fp32 on the CPU, in radians per position of each pair."""
    if isinstance(rope.scaling, Yarn):
        return yarn_frequencies(rope.dim, rope.theta, rope.scaling)
    if isinstance(rope.scaling, LinearScaling):
        return inverse_frequencies(rope.dim, rope.theta, None) / rope.scaling.factor
    return inverse_frequencies(rope.dim, rope.theta, rope.scaling)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the frequencies, [head_dim / 2] fp32 on the CPU, in radians per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    # 0 for wavelengths longer than `low` (interpolated), 1 for those shorter than `high` (kept), linear
    # between.
    keep = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    stretched = torch.where(wavelengths > low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < high, frequencies, stretched)


def yarn_frequencies(head_dim: int, theta: float, yarn: Yarn) -> Tensor:
    """Return the frequencies scaled as in YaRN, [head_dim / 2] fp32 on the CPU, in radians per position.

    Pairs that turn more than `beta_fast` times in the original context are kept, those that turn less than
    `beta_slow` times are fully interpolated, with a linear ramp over the pairs in between.
    """
    frequencies = inverse_frequencies(head_dim, theta, None)

    def pair(turns: float) -> float:
        """Return the index of the pair that turns this often in the original context."""
        wavelength = yarn.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    stretched = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / yarn.factor * stretched + frequencies * (1 - stretched)


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of every angle.

    Args:
        positions: [B, S] or [1, S] int64.
        frequencies: [head_dim / 2] fp32.

    Returns:
        Two fp32 tensors [B, S, 1, head_dim / 2].
    """
    angles = positions[..., None].float() * frequencies
    return angles.cos()[:, :, None, :], angles.sin()[:, :, None, :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, S, heads, head_dim], computed in fp32, returned in x's dtype. Dimensions of a head beyond
    those with angles are unchanged."""
    width = 2 * cos.shape[-1]
    if x.shape[-1] > width:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
