"""NF4 with double quantization, in plain torch.

Each block of 64 neighbours in a row is divided by its largest magnitude and rounded to the nearest of 16
levels, the quantiles of a normal distribution; two codes share a byte, the first in the upper half. The
magnitudes, less their mean over the matrix, are quantized themselves, in blocks of 256, to 256 levels of 8
bits. Sources: QLoRA (arXiv 2305.14314), section 3 and appendix E; 8-bit dynamic levels (arXiv 2110.02861),
section 1.3. Codes, scales and values are those of bitsandbytes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Values that share a scale."""
NESTED = 256
"""Scales that share a scale of their own."""
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values of NF4 (QLoRA, appendix E)."""
STEPS = 65535
"""A scale is rounded to one of these equal steps between -1 and 1 before the nearest level is found, as
bitsandbytes does on a CPU: the same bits on every device."""
_LEAST = 1e-38
"""In place of a magnitude of 0."""


class Scales(NamedTuple):
    """The scales of a matrix [rows, in], or of a stack of matrices [E, rows, in]."""

    codes: Tensor
    """[…, rows, in / 64] uint8."""
    nested: Tensor
    """[n] or [E, n] fp32: the scale of each 256 scales of a matrix, row by row."""
    offset: Tensor
    """[] or [E] fp32, their mean."""


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of a matrix or stack, or of some of its whole blocks, [..., in / 2] uint8, and the
    scale of each block, [..., in / 64] fp32."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    codes = _nearest(_divided(blocks, largest), _levels(weight.device)).flatten(-2)
    return (codes[..., ::2] << 4) | codes[..., 1::2], largest


def quantise_scales(scales: Tensor) -> Scales:
    """Quantize the scales of a whole matrix, [rows, in / 64] fp32, or of each matrix of a stack."""
    if scales.ndim > 2:
        found = [quantise_scales(one) for one in scales]
        return Scales(*(torch.stack(parts) for parts in zip(*found, strict=True)))
    offset = scales.mean()
    flat = scales.flatten() - offset
    missing = -len(flat) % NESTED
    blocks = torch.nn.functional.pad(flat, (0, missing)).view(-1, NESTED)
    largest = blocks.abs().amax(-1)
    steps = ((_divided(blocks, largest) + 1) * 0.5 * STEPS + 0.5).int()
    codes = _nearest_of_step(scales.device)[steps].masked_fill_(largest[:, None] == 0, 0)
    return Scales(codes.flatten()[: len(flat)].view(scales.shape), largest, offset)


def dequantise_scales(scales: Scales, origin: tuple[int, ...] = (), width: int | None = None) -> Tensor:
    """Return scales, [..., rows, in / 64] fp32.

    Args:
        origin: where the codes begin in the whole tensor, in scales along each dimension; the nested scales
            are always those of the whole.
        width: scales of a whole row; None: the codes have whole rows.
    """
    codes, nested, offset = scales
    *experts, first, left = origin or (0,) * codes.ndim
    width = codes.shape[-1] if width is None else width
    rows, columns = (torch.arange(size, device=codes.device) for size in codes.shape[-2:])
    place = ((rows + first)[:, None] * width + columns + left) // NESTED
    if experts:
        mine = slice(experts[0], experts[0] + codes.shape[0])
        nested, offset = nested[mine], offset[mine, None, None]
    values = _dynamic_levels(codes.device)[codes.int()]
    return values * nested[..., place] + offset


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values [..., in], computed in fp32 and rounded once; see `quantise` for the arguments."""
    levels = _levels(codes.device)
    values = torch.stack((levels[(codes >> 4).int()], levels[(codes & 15).int()]), -1)
    return (values.view(*scales.shape, BLOCK) * scales[..., None]).flatten(-2).to(dtype)


def _divided(blocks: Tensor, largest: Tensor) -> Tensor:
    return (blocks * (1.0 / largest.clamp(min=_LEAST))[..., None]).clamp_(-1, 1)


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """Return the index of the nearest level, uint8; halfway between two, of the lower one."""
    return torch.bucketize(values, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)


def kept(make: Callable[[torch.device], Tensor]) -> Callable[[torch.device], Tensor]:
    """Make a table once for each device; one that has no memory, as of a dry run, is not for others."""
    tables: dict[torch.device, Tensor] = {}

    @wraps(make)
    def table(device: torch.device) -> Tensor:
        found = tables.get(device)
        if found is None:
            found = make(device)
            if type(found) is Tensor:
                tables[device] = found
        return found

    return table


@kept
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


@kept
def _nearest_of_step(device: torch.device) -> Tensor:
    steps = torch.arange(STEPS + 1, dtype=torch.float32, device=device)
    return _nearest(-1 + 2 * steps / STEPS, _dynamic_levels(device))


@kept
def _dynamic_levels(device: torch.device) -> Tensor:
    """Return the levels: 0, 1, and ±10^-k times the centres of 2^(6 - k) equal parts of [0.1, 1]."""
    found = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1).tolist()
        centres = torch.tensor([(low + high) / 2 for low, high in pairwise(bounds)])
        positive = (10.0 ** (exponent - 6) * centres).tolist()
        found += [*positive, *(-value for value in positive)]
    return torch.tensor(sorted(found), device=device)
