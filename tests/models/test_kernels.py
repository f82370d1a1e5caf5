"""Which attention kernels are taken."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from tests.models.specs import attention
from titancli.models.blocks import kernels
from titancli.models.blocks.attention import Attention, attend
from titancli.models.blocks.latent import LatentAttention
from titancli.protocols.shape import Latent, Rope


def test_cudnn_leads_from_hopper_on_and_flash_before() -> None:
    assert kernels.order((9, 0))[:2] == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    assert kernels.order((12, 0))[0] == SDPBackend.CUDNN_ATTENTION
    assert kernels.order((8, 9))[:2] == [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def test_a_cpu_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kernels.prefer_fast_kernels(Attention(attention(8, 2, 1, 4)), torch.device("cpu"), torch.float32, 16)
    assert kernels.logger.name not in {record.name for record in caplog.records}
    assert kernels._preference is None


def test_a_gpu_is_given_the_order_once_and_the_choice_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a stand-in for the GPU: what it would run on is asked of torch, which has none here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "can_use_cudnn_attention", lambda params: False)
    monkeypatch.setattr(kernels, "can_use_flash_attention", lambda params: params.enable_gqa)
    monkeypatch.setattr(kernels, "_preference", None)
    empty, before = torch.empty, torch._C._get_sdp_priority_order()
    try:
        with caplog.at_level(logging.INFO), monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda shape, device, **rest: empty(shape, **rest))
            for _ in range(2):
                kernels.prefer_fast_kernels(
                    nn.Sequential(Attention(attention(8, 2, 1, 4))),
                    SimpleNamespace(type="cuda"),
                    torch.bfloat16,
                    16,
                )
        assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.CUDNN_ATTENTION)
        q = torch.randn(1, 2, 4, 8)
        attend = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(attend(q, q, q), scaled_dot_product_attention(q, q, q))
    finally:
        kernels._preference.__exit__(None, None, None)
    assert torch._C._get_sdp_priority_order() == before
    said = [record.getMessage() for record in caplog.records if record.name == kernels.logger.name]
    assert said == ["attention runs on flash attention"] * 2


def test_layers_with_sinks_or_windows_are_named_by_the_kernel_that_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "first_usable", lambda backends, params: SDPBackend.CUDNN_ATTENTION)
    given: Any = (torch.bfloat16, 16, kernels.order((9, 0)))
    gpu: Any = SimpleNamespace(type="cuda")
    empty = torch.empty
    made = [Attention(attention(16, 2, 1, 8, **how)) for how in ({}, {"sinks": True}, {"window": 4})]
    wide = Attention(attention(16, 2, 1, 8, window=16))  # limits nothing of such rows
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda shape, device, **rest: empty(shape, **rest))
        found = [kernels.runs_on(layer, gpu, *given) for layer in (*made, wide)]
        in_fp32 = kernels.runs_on(made[1], gpu, torch.float32, *given[1:])
    assert found == ["cuDNN", "flash attention", "flash attention", "cuDNN"]
    assert in_fp32 == "flex attention"


@pytest.mark.parametrize(
    ("capability", "takes", "fills"), [((9, 0), True, False), ((9, 0), False, True), ((8, 0), True, True)]
)
def test_narrow_values_are_filled_up_unless_cudnn_takes_them(
    capability: tuple[int, int], takes: bool, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the GPU; what cuDNN takes is asked of torch."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "can_use_cudnn_attention", lambda params: asked.append(params) or takes)
    monkeypatch.setattr(kernels, "_preference", nullcontext())
    sizes = dict(dim=8, heads=2, kv_heads=2, head_dim=24, width=16, kv_rank=4)
    module, empty = LatentAttention(Latent(**sizes, rope=Rope(8, 10000.0), scale=0.2)), torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda shape, device, **rest: empty(shape, **rest))
        kernels.prefer_fast_kernels(module, SimpleNamespace(type="cuda"), torch.bfloat16, 64)
    assert module.fills is fills
    for params in asked:
        assert (params.query.shape, params.value.shape) == ((1, 1, 64, 24), (1, 1, 64, 16))
    q, k, v = (torch.randn(1, 6, 2, width) for width in (24, 24, 16))
    filled, bare = (attend(q, k, v, None, fill=fill) for fill in (True, False))
    torch.testing.assert_close(bare, filled)


def test_what_no_fast_kernel_can_do_falls_to_plain_products() -> None:
    q = torch.randn(1, 2, 4, 8)
    params = kernels.SDPAParams(q, q, q, None, 0.0, True, False)
    assert kernels.first_usable(kernels.order((9, 0)), params) == SDPBackend.MATH
