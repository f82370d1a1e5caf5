"""Quantization to Q4_K and Q6_K, which the gguf package reads and does not write.

Both store super-blocks of 256 values of a row. Q4_K: 8 sub-blocks of 32 values, each `d·s·q − dmin·m` with
q in 0..15 and s, m in 0..63; `d` and `dmin` are float16. Q6_K: 16 sub-blocks of 16 values, each
`d·s·(q − 32)` with q in 0..63 and s in −128..127. Source: ggml-common.h of ggml.

The scale (and the minimum) of a sub-block are found by least squares: levels are rounded with several scales
around the one that spans the sub-block, the best scale for these levels is computed, and of all of them the
one with the least weighted error is kept. Large values weigh more, since they matter more in a product.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
Q4_BYTES, Q6_BYTES = 144, 210


def q4_k(values: Tensor) -> Tensor:
    """Return rows of float32 [R, C], C a multiple of 256, as Q4_K: uint8 [R, C / 256 * 144]."""
    rows, columns = values.shape
    x = values.reshape(-1, 8, 32)
    scales, mins = _affine(x)
    d, s = _shared(scales, 63)
    dmin, m = _shared(mins, 63)
    step, low = d[:, None] * s, dmin[:, None] * m
    q = ((x + low[..., None]) * _inverse(step)[..., None]).round().clamp(0, 15).to(torch.uint8)
    pairs = q.view(-1, 4, 2, 32)
    parts = [_half(d), _half(dmin), _six_bits(s, m), (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)]
    return torch.cat(parts, 1).view(rows, columns // BLOCK * Q4_BYTES)


def q6_k(values: Tensor) -> Tensor:
    """Return rows of float32 [R, C], C a multiple of 256, as Q6_K: uint8 [R, C / 256 * 210]."""
    rows, columns = values.shape
    x = values.reshape(-1, 16, 16)
    scales = _symmetric(x, 32)
    largest = torch.gather(scales, 1, scales.abs().argmax(1, keepdim=True))[:, 0]
    d = _as_half(largest / -128)
    s = (scales * _inverse(d)[:, None]).round().clamp(-128, 127)
    step = d[:, None] * s
    q = ((x * _inverse(step)[..., None]).round().clamp(-32, 31) + 32).to(torch.uint8)
    a, b, c, e = q.view(-1, 2, 4, 32).unbind(2)
    low = torch.cat([a & 15 | (c & 15) << 4, b & 15 | (e & 15) << 4], 2)
    high = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | e >> 4 << 6
    parts = [low.flatten(1), high.flatten(1), s.to(torch.int8).view(torch.uint8), _half(d)]
    return torch.cat(parts, 1).view(rows, columns // BLOCK * Q6_BYTES)


def _affine(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the minimum, negated, of each sub-block [..., 32]: both at least 0.

    A value is `scale · q − minimum`. What lies above 0 in whole has no minimum, as the format cannot add.
    """
    weight = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low = x.amin(-1).clamp(max=0)
    span = x.amax(-1) - low
    total, total_x = weight.sum(-1), (weight * x).sum(-1)
    best_scale, best_low = span / 15, low
    best = torch.full_like(span, torch.inf)
    for tried in [15.0] + [14 + 0.1 * number for number in range(21)]:
        q = ((x - low[..., None]) * (tried * _inverse(span))[..., None]).round().clamp(0, 15)
        wq = weight * q
        total_q, total_qq, total_qx = wq.sum(-1), (wq * q).sum(-1), (wq * x).sum(-1)
        determinant = total * total_qq - total_q.square()
        scale = (total * total_qx - total_x * total_q) * _inverse(determinant)
        offset = (total_qq * total_x - total_q * total_qx) * _inverse(determinant)
        above = offset > 0
        offset = torch.where(above, 0, offset)
        scale = torch.where(above, total_qx * _inverse(total_qq), scale)
        error = (weight * (scale[..., None] * q + offset[..., None] - x).square()).sum(-1)
        better = (error < best) & (determinant > 0) & (scale > 0)
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        best_low = torch.where(better, offset, best_low)
    return best_scale, -best_low


def _symmetric(x: Tensor, levels: int) -> Tensor:
    """Return the scale of each sub-block [..., 16] for levels from −levels to levels − 1; it may be negative,
    so that the largest value, of either sign, has the level that exists on one side alone."""
    weight = x.square()
    largest = torch.gather(x, -1, x.abs().argmax(-1, keepdim=True))[..., 0]
    scale, best = torch.zeros_like(largest), torch.zeros_like(largest)
    for number in range(-9, 10):
        q = (x * (-(levels + 0.1 * number) * _inverse(largest))[..., None]).round().clamp(-levels, levels - 1)
        wq = weight * q
        total_qx, total_qq = (wq * x).sum(-1), (wq * q).sum(-1)
        gain = total_qx.square() * _inverse(total_qq)  # by how much the squared error is less than without
        better = gain > best
        best = torch.where(better, gain, best)
        scale = torch.where(better, total_qx * _inverse(total_qq), scale)
    return scale


def _shared(values: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return float16 factors [N], as float32, and integers up to `levels` [N, 8] whose products are the
    values."""
    factor = _as_half(values.amax(1) / levels)
    return factor, (values * _inverse(factor)[:, None]).round().clamp(0, levels)


def _inverse(values: Tensor) -> Tensor:
    """Return 1 / values, and 0 where that is 0 or no finite number."""
    found = values.reciprocal()
    return torch.where(found.isfinite(), found, 0)


def _as_half(values: Tensor) -> Tensor:
    return values.half().float()


def _half(values: Tensor) -> Tensor:
    """Return the bytes of float16 numbers [N]: uint8 [N, 2], little-endian."""
    bits = values.half().view(torch.int16).int()
    return torch.stack([bits & 255, bits >> 8 & 255], 1).to(torch.uint8)


def _six_bits(s: Tensor, m: Tensor) -> Tensor:
    """Return eight scales and eight minimums of six bits each [N, 8] in twelve bytes: the lower bits of the
    last four share four bytes, and their upper bits are above those of the first four."""
    s, m = s.to(torch.uint8), m.to(torch.uint8)
    first = [one[:, :4] | one[:, 4:] >> 4 << 6 for one in (s, m)]
    return torch.cat([*first, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1)
