"""Low-precision number formats: what a tensor's values become, bit for bit as in torchao.

Numbers along the last dimension, which a product sums over, share scales: a whole row (float8 rowwise), or a
block of it. Weights may share them over tiles of several rows. Sources: OCP Microscaling Formats 1.0 (MX),
cuBLAS's block scaling (RCEIL), "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149),
DeepSeek-V3 (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0
SMALLEST_E4M3 = 2.0**-6
"""The smallest normal number, which scales of NVFP4 do not fall below."""
LARGEST_E2M1 = 6.0
SMALLEST_MAXIMUM = 1e-12
"""Maxima below are taken for this one, so that no scale is infinite."""
E8M0_BIAS = 127
E8M0_NAN = 255


class Codes(NamedTuple):
    """A tensor in low precision."""

    data: Tensor
    """[…, rows, K] e4m3, or […, rows, K/2] bytes of two e2m1 each, the first in the lower half."""
    scale: Tensor
    """What the numbers are multiplied with, [… rows/r, K/c] for tiles of r rows and c columns."""
    whole: Tensor | None = None
    """NVFP4's second factor, which broadcasts to `scale`."""
    group: Tensor | None = None
    """[K], the group of each column; `scale` is then [rows, groups]."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the values, rounded once from float32: […, rows, K]."""
        numbers = self.data.float() if self.data.dtype == E4M3 else _decoded(self.data)
        if self.group is not None:
            return (numbers * self.scale.index_select(-1, self.group)).to(dtype)
        numbers = _times(numbers, self.scale.float())
        if self.whole is not None:
            numbers = _times(numbers, self.whole.expand_as(self.scale))
        return numbers.to(dtype)


def _tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """View as […, R/r, r, K/c, c]."""
    across = x.unflatten(-1, (x.shape[-1] // columns, columns))
    return across.unflatten(-3, (x.shape[-2] // rows, rows))


def _times(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply each tile with its factor."""
    rows = x.shape[-2] // max(1, scale.shape[-2])  # 0 of 0
    tiles = _tiles(x, max(1, rows), x.shape[-1] // scale.shape[-1])
    return (tiles * scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2)


def largest_of(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest magnitude of each tile, […, R/r, K/c]."""
    return _tiles(x, rows, columns).abs().amax((-3, -1))


def group_maxima(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the largest magnitude of each row in each group of columns: [R, K] to [R, groups] float32."""
    zeros = x.new_zeros(x.shape[0], groups, dtype=torch.float32)
    return zeros.scatter_reduce(1, group.expand(x.shape), x.abs().float(), "amax")


def _saturated(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)


# ------------------------------------------------------------------------------------------------ float8


def rowwise(x: Tensor, group: Tensor | None = None, groups: int = 0, block: int = 1) -> Codes:
    """Cast to e4m3 with a power of two as the scale of each row; of each group of its columns, if given.

    Args:
        block: columns that are of the same group, one after the other.
    """
    if group is None:
        largest = x.abs().amax(-1, keepdim=True)
    else:
        largest = group_maxima(largest_of(x, 1, block), group[::block], groups)
    # In float64, as torchao: compiled code rounds this division in another way than eager code.
    scale = (LARGEST_E4M3 / largest.double().clamp(min=SMALLEST_MAXIMUM)).float()
    scale = scale.log2().floor().exp2()
    data = _saturated(x.float() * (scale if group is None else scale.index_select(-1, group)))
    return Codes(data, scale.reciprocal(), group=group)


def blockwise(x: Tensor, rows: int = 1, columns: int = 128) -> Codes:
    """Cast to e4m3 with a float32 scale for each tile: 1 × 128 of activations, 128 × 128 of weights."""
    largest = largest_of(x, rows, columns).double().clamp(min=SMALLEST_MAXIMUM)
    scale = (LARGEST_E4M3 / largest).float()
    return Codes(_saturated(_times(x, scale)), 1.0 / scale)


# -------------------------------------------------------------------------------------------------- MXFP8


def mxfp8(x: Tensor, *, floor: bool = False, block: int = 32) -> Codes:
    """Cast to e4m3 with a power of two (e8m0) as the scale of each 32 numbers of a row.

    Args:
        floor: take the scale's exponent from the largest number alone (OCP), so that some numbers saturate;
            else the smallest power of two with which none does (RCEIL).
    """
    largest = largest_of(x, 1, block).float()
    exponent, factor = _floor(largest) if floor else _rceil(largest)
    data = _saturated(_times(x.float(), factor))
    return Codes(data, exponent.view(torch.float8_e8m0fnu))


def _rceil(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biased exponents of the scales, and the factors that numbers are multiplied with."""
    scale = largest / LARGEST_E4M3
    exponent = scale.log2().ceil().clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS
    exponent = torch.where(scale.isnan(), E8M0_NAN, exponent).to(torch.uint8)
    factor = torch.where(exponent == 0, 1.0, torch.exp2(E8M0_BIAS - exponent.float()))
    return exponent, torch.where(exponent == E8M0_NAN, scale, factor)


def _floor(largest: Tensor) -> tuple[Tensor, Tensor]:
    power = ((largest.view(torch.int32) >> 23) & 0xFF) - E8M0_BIAS - 8  # 2^8 is e4m3's largest power of two
    exponent = (power.clamp(-E8M0_BIAS, E8M0_BIAS + 1) + E8M0_BIAS).to(torch.uint8)
    exponent = torch.where(largest.isnan(), E8M0_NAN, exponent).to(torch.uint8)
    scale = (exponent.int() << 23).view(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    return exponent, 1.0 / scale


# -------------------------------------------------------------------------------------------------- NVFP4


def nvfp4(
    x: Tensor, largest: Tensor, *, rows: int = 1, noise: Tensor | None = None, block: int = 16
) -> Codes:
    """Round to e2m1 with two factors: one of all numbers, and an e4m3 scale of each tile.

    Args:
        x: […, rows, K].
        largest: the largest magnitude that the first factor is made of; broadcasts to the tiles' scales.
        rows: rows of a tile, which is `block` wide.
        noise: uniform in [0, 1), of x's shape: round up or down by it, so that the expected value is x.
            None: round to the nearest.
    """
    whole = largest.float() / (LARGEST_E4M3 * LARGEST_E2M1)
    whole = torch.where(whole == 0, 1.0, whole)  # of zeros alone
    scale = largest_of(x.float(), rows, block) / LARGEST_E2M1 / whole
    scale = scale.clamp(SMALLEST_E4M3, LARGEST_E4M3).to(E4M3)
    scaled = _times(x.float(), (1.0 / whole) / scale.float()).clamp(-LARGEST_E2M1, LARGEST_E2M1)
    return Codes(_encoded(scaled if noise is None else _randomly(scaled, noise)), scale, whole)


def _randomly(x: Tensor, noise: Tensor) -> Tensor:
    """Round to a neighbour among the numbers of e2m1, the nearer the likelier."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step + noise).floor() * step, x)


def _encoded(x: Tensor) -> Tensor:
    """Return the nearest e2m1, of two equally near ones the even: two of a row in each byte."""
    size = x.abs()
    # Halfway between two neighbours; a tie goes up where the upper one is even.
    code = torch.zeros_like(size, dtype=torch.uint8)
    for number, halfway in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += size >= halfway if number % 2 else size > halfway
    code = code | (x.signbit().to(torch.uint8) << 3)
    return code[..., ::2] | (code[..., 1::2] << 4)


def _decoded(packed: Tensor) -> Tensor:
    code = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2).int()
    exponent, half = ((code >> 1) & 3) - 1, 0.5 * (code & 1)
    size = torch.where(exponent < 0, half, (1 + half) * torch.exp2(exponent.float()))
    return torch.where(code < 8, size, -size)


SIGNS = (1, -1, 1, 1, -1, -1, 1, -1, 1, 1, 1, -1, -1, 1, -1, -1)
"""A random vector, the same for all layers and runs (arXiv 2509.25149, appendix E)."""
_POSITIVE = sum(1 << number for number, sign in enumerate(SIGNS) if sign > 0)


def turned(x: Tensor) -> Tensor:
    """Apply a randomized Hadamard transform to each 16 numbers of a row: outliers spread over all of them.

    It is orthogonal, so that a product of two turned operands is that of the operands.
    """
    size = len(SIGNS)
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    # Without a table, for which the host would wait.
    positive = (_POSITIVE >> torch.arange(size, device=x.device)) & 1
    matrix = (2 * positive - 1).to(x.dtype)[:, None] * matrix * size**-0.5
    return (x.unflatten(-1, (-1, size)) @ matrix).flatten(-2)


class Padded(NamedTuple):
    """Tokens by expert, each expert's filled up with zeros to whole blocks.

    How many rows that makes is known to the device alone, so there are as many as there could be; those
    behind the last expert's belong to none.
    """

    rows: int
    place: Tensor
    """[M], where each token is."""
    ends: Tensor
    """[E] int32, the end of each expert's rows."""
    group: Tensor
    """[rows], the expert of each row; of those that belong to none the last."""

    @classmethod
    def of(cls, ends: Tensor, tokens: int, block: int) -> Padded:
        """Return the places of `tokens` tokens, of which each expert's end at `ends` [E]."""
        experts = len(ends)
        counts = ends.diff(prepend=ends.new_zeros(1))
        sizes = (counts + block - 1) // block * block
        padded = sizes.cumsum(0).int()
        rows = (tokens + experts * (block - 1)) // block * block
        shift = (padded - sizes) - (ends - counts)
        at = torch.arange(tokens, device=ends.device, dtype=torch.int32)
        place = at + shift[torch.searchsorted(ends, at, right=True)]
        at = torch.arange(rows, device=ends.device, dtype=torch.int32)
        group = torch.searchsorted(padded, at, right=True).clamp(max=experts - 1)
        return cls(rows, place.long(), padded, group)

    def fill(self, x: Tensor) -> Tensor:
        """Put tokens into their places: [M, K] to [rows, K]."""
        return x.new_zeros(self.rows, x.shape[1]).index_copy(0, self.place, x)
