"""Specs of small layers, for tests of their modules."""

from __future__ import annotations

from typing import Any

import torch

from titancli.models.sections import MoE
from titancli.protocols import shape
from titancli.registry.component import build


def size_of(config: Any) -> int:
    """How many parameters a model has, tied ones once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config, seq_len=16).parameters())


def attention(dim: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> shape.Attention:
    sizes = {"dim": dim, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return shape.Attention(**sizes, rope=shape.Rope(head_dim, 10000.0), **options)


def experts(dim: int, hidden_dim: int, num_experts: int, **options: Any) -> shape.Experts:
    routing = MoE(num_experts=num_experts, hidden_dim=hidden_dim)
    return shape.Experts(dim=dim, routing=routing, **options)
