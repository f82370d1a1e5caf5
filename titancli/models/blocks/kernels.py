"""The choice of torch's attention kernels on a GPU: cuDNN's where they are fastest, else flash attention."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from titancli.models.blocks.attention import Attention, AttentionCall, kernel_of
from titancli.models.blocks.latent import LatentAttention

logger = logging.getLogger(__name__)

HOPPER = (9, 0)
NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash attention",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.MATH: "plain matrix products",
}
OWN: dict[str, str] = {"flash": NAMES[SDPBackend.FLASH_ATTENTION], "flex": "flex attention"}
"""Names of titan's own kernels, by `kernel_of`."""

# Kept for the life of the process: closing or collecting it would restore torch's own order.
_preference: AbstractContextManager[Any] | None = None


def order(capability: tuple[int, int]) -> list[SDPBackend]:
    """Return the backends, best first: cuDNN leads from Hopper on, flash attention before."""
    first, second = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    if capability < HOPPER:
        first, second = second, first
    return [first, second, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def prefer_fast_kernels(model: nn.Module, device: torch.device, dtype: torch.dtype, seq_len: int) -> None:
    """On a GPU, let attention try the fastest kernels first, and log which kernels a decoder's rows will run
    on.

    The order is global to the process and is set before anything is traced, so compiled blocks use it too. On
    a CPU, which has one fast kernel, nothing is done.
    """
    global _preference
    if device.type != "cuda":
        return
    backends = order(torch.cuda.get_device_capability(device))
    if _preference is None:
        _preference = sdpa_kernel(backends, set_priority=True)
        _preference.__enter__()
    for module in model.modules():
        if isinstance(module, LatentAttention):
            module.fills = not takes_narrow_values(module, device, dtype, seq_len, backends)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if layers:  # otherwise a plugin's own attention, whose shapes are unknown
        names = dict.fromkeys(runs_on(layer, device, dtype, seq_len, backends) for layer in layers)
        logger.info("attention runs on %s", ", ".join(names))


def runs_on(
    attention: Attention, device: torch.device, dtype: torch.dtype, seq_len: int, backends: list[SDPBackend]
) -> str:
    """Return the name of the kernel that computes a layer's attention over rows of one document."""
    limited = attention.reach.limits(seq_len)
    call = AttentionCall(
        device=device.type,
        dtype=dtype,
        head_dim=attention.head_dim,
        value_dim=attention.value_dim,
        window=limited and attention.reach.window is not None,
        chunk=limited and attention.reach.chunk is not None,
        sinks=attention.sinks is not None,
        cap=attention.cap is not None,
    )
    kernel = kernel_of(call)
    if kernel in OWN:
        return OWN[kernel]
    heads, kv_heads = (w.shape[0] // attention.head_dim for w in (attention.wq.weight, attention.wk.weight))
    shapes = [(1, count, seq_len, attention.head_dim) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.empty(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    params = SDPAParams(q, k, v, None, 0.0, True, heads != kv_heads)
    return NAMES[first_usable(backends, params)]


def takes_narrow_values(
    attention: LatentAttention,
    device: torch.device,
    dtype: torch.dtype,
    seq_len: int,
    backends: list[SDPBackend],
) -> bool:
    """Return whether the preferred backend is cuDNN and supports values narrower than keys, such as
    DeepSeek's 128 beside 192 from Hopper on; it has no kernels for padded values that wide."""
    if backends[0] != SDPBackend.CUDNN_ATTENTION:
        return False
    widths = (attention.head_dim, attention.head_dim, attention.value_dim)
    q, k, v = (
        torch.empty((1, 1, seq_len, width), device=device, dtype=dtype, requires_grad=True)
        for width in widths
    )
    return bool(can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, False)))


def first_usable(backends: list[SDPBackend], params: SDPAParams) -> SDPBackend:
    """Return the backend that torch will choose for such an input."""
    usable = {
        SDPBackend.CUDNN_ATTENTION: can_use_cudnn_attention,
        SDPBackend.FLASH_ATTENTION: can_use_flash_attention,
        SDPBackend.EFFICIENT_ATTENTION: can_use_efficient_attention,
    }
    return next((b for b in backends if b in usable and usable[b](params)), SDPBackend.MATH)
