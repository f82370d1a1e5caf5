"""Which kernels a device runs, for tensors on meta: what they keep for backward is all that differs.

torch chooses attention's kernel where the tensors are, and has none for meta; and on a GPU a norm is one
kernel, which is several elsewhere. Those of titan's own choosing follow `titancli.distributed.device`.
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
"""Numbers of a head that flash attention takes."""


class Kernels(TorchFunctionMode):
    """While it is entered, functions of torch call the operators that a device would run."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.on_gpu = device == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _attention(self.on_gpu, *args, **kwargs)
        if func is rms_norm and self.on_gpu:
            return _norm(*args, **kwargs)
        return func(*args, **kwargs)


def _norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """As much is kept as of a layer norm (its mean aside, one number of each row)."""
    if weight is not None and weight.dtype != x.dtype:  # then there is no such kernel on a GPU either
        return rms_norm(x, shape, weight, eps)
    return torch.native_layer_norm(x, shape, weight, None, 1e-5)[0]


def _attention(
    on_gpu: bool,
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
    """As `scaled_dot_product_attention`, which makes scores only where no kernel takes what it is given."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:  # one to be added to scores
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    alike = q.shape[-1] == v.shape[-1]
    grouped = q.shape[1] != k.shape[1]
    if not on_gpu and alike and not dropout_p:
        out, _ = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return out
    fits = on_gpu and q.shape[-1] <= WIDEST
    if fits and mask is None and q.dtype in HALVES:
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
