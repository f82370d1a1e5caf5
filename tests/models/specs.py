"""Specs of small layers, for tests of their modules."""

from __future__ import annotations

from typing import Any

from titancli.models import shape
from titancli.models.sections import MoE


def attention(dim: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> shape.Attention:
    sizes = {"dim": dim, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return shape.Attention(**sizes, rope=shape.Rope(head_dim, 10000.0), **options)


def experts(dim: int, hidden_dim: int, num_experts: int, **options: Any) -> shape.Experts:
    routing = MoE(num_experts=num_experts, hidden_dim=hidden_dim)
    return shape.Experts(dim=dim, routing=routing, **options)
