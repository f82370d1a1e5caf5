"""torchao's products in MXFP8 and NVFP4, whose kernels are Blackwell's (compute capability 10.0).

They want whole blocks of tokens: zeros fill up the last one, of experts that of each expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from titan_float8.ao import ignoring_noise
from titan_float8.formats import E4M3, SIGNS, Padded

if TYPE_CHECKING:
    from titan_float8.scheme import Scheme

MULTIPLE = 128
"""What the sides of a matrix, and the number of tokens, must be multiples of for NVFP4's kernels."""


def product(x: Tensor, weight: Tensor, scheme: Scheme, *, emulated: bool = False) -> Tensor:
    """Multiply […, K] with [N, K] transposed.

    Args:
        emulated: run torchao's emulation of MXFP8 instead of its kernels.
    """
    rows = x.reshape(-1, x.shape[-1])
    block = scheme.block if scheme.format == "mxfp8" else MULTIPLE
    rows = pad(rows, (0, 0, 0, -len(rows) % block))
    out = _mxfp8(rows, weight, scheme, emulated) if scheme.format == "mxfp8" else _nvfp4(rows, weight)
    return out[: x.numel() // x.shape[-1]].view(*x.shape[:-1], -1)


def _mxfp8(rows: Tensor, weight: Tensor, scheme: Scheme, emulated: bool) -> Tensor:
    with ignoring_noise():
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice as Dim0
        from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice as Dim1
        from torchao.quantization.quantize_.common import KernelPreference
    kernels = (
        (KernelPreference.EMULATED, Dim0.TORCH, Dim1.TORCH)
        if emulated
        else (KernelPreference.AUTO, Dim0.TRITON, Dim1.CUDA)
    )
    formats = (E4M3, E4M3, E4M3, scheme.block)
    found: Tensor = mx_mm.apply(rows, weight, *formats, *kernels, _mode(scheme), scheme.plain_grad_weight)
    return found


def _nvfp4(rows: Tensor, weight: Tensor) -> Tensor:
    with ignoring_noise():
        from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear
    # Its random offsets come from the device's generator, which each step seeds.
    seed = torch.zeros(1, dtype=torch.int64, device=rows.device)
    found: Tensor = nvfp4_linear(rows, weight, sign_vector=SIGNS, sr_seed=seed)
    return found


def grouped_product(
    x: Tensor, weight: Tensor, ends: Tensor, scheme: Scheme, *, emulated: bool = False
) -> Tensor:
    """Multiply each expert's tokens with its matrix in MXFP8: [M, K], [E, N, K] to [M, N]."""
    with ignoring_noise():
        from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
        from torchao.quantization.quantize_.common import KernelPreference

    padded = Padded.of(ends, len(x), scheme.block)
    out = _to_mxfp8_then_scaled_grouped_mm(
        padded.fill(x),
        weight.transpose(1, 2),
        padded.ends,
        out_dtype=x.dtype,
        kernel_preference=KernelPreference.EMULATED if emulated else KernelPreference.AUTO,
        wgrad_with_hp=scheme.plain_grad_weight,
        scale_calculation_mode=_mode(scheme),
    )
    return out.index_select(0, padded.place)


def _mode(scheme: Scheme) -> Any:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    return ScaleCalculationMode.FLOOR if scheme.floor else ScaleCalculationMode.RCEIL
