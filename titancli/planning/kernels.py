"""Run the kernels of a target device on meta tensors: kernels differ in what they keep for backward.

torch chooses attention's kernel by where the tensors are, and has none for meta; and an RMS norm is one
kernel on a GPU, but several operators elsewhere. Kernels that titan chooses itself follow
`titancli.distributed.device`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
WIDEST = 256
"""Largest head size that flash attention supports."""


class Kernels(TorchFunctionMode):
    """A mode under which torch's functions call the operators that the target device would run. With `blocks`
    attention is within documents: computed in blocks, it keeps as much as flash attention."""

    def __init__(self, device: str, blocks: bool = False) -> None:
        super().__init__()
        self.on_gpu, self.blocks = device == "cuda", blocks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _attention(self.on_gpu, self.blocks, *args, **kwargs)
        if func is rms_norm and self.on_gpu:
            return _norm(*args, **kwargs)
        return func(*args, **kwargs)


def _norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Call a layer norm, which keeps as much as the fused RMS norm (plus a mean, one number per row)."""
    if weight is not None and weight.dtype != x.dtype:  # a GPU has no fused kernel for that either
        return rms_norm(x, shape, weight, eps)
    return torch.native_layer_norm(x, shape, weight, None, 1e-5)[0]


def _attention(
    on_gpu: bool,
    blocks: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that `scaled_dot_product_attention` would choose; only without a fitting one are
    scores materialized."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:  # kernels take additive masks
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    alike = q.shape[-1] == v.shape[-1]
    grouped = q.shape[1] != k.shape[1]
    if not on_gpu and alike and not dropout_p:
        out, _ = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return out
    fits = on_gpu and q.shape[-1] <= WIDEST
    if fits and mask is None and (blocks or q.dtype in HALVES):
        if alike:
            return _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        return _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, dropout_p, is_causal, scale=scale
        )[0]
    if fits and not grouped:
        return _aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
