"""Experts with biases and a clamped SwiGLU. Source: gpt-oss Model Card (arXiv 2508.10925)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from titancli.models.blocks.grouped import add_bias
from titancli.models.blocks.moe import Experts

if TYPE_CHECKING:
    from titancli.protocols import shape


class ClampedExperts(Experts):
    """`w2((clamp(u) + 1) * g * sigmoid(alpha * g)) + w2_bias`, where g and u are the halves of `w13 x +
    w13_bias`, g clamped from above and u from both sides."""

    def __init__(self, spec: shape.Experts) -> None:
        super().__init__(spec)
        self.alpha, self.limit = cast("tuple[float, float]", spec.clamped)

    @staticmethod
    def shapes(dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        both = 2 * hidden_dim
        return {"w13": (both, dim), "w13_bias": (both,), "w2": (dim, hidden_dim), "w2_bias": (dim,)}

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        ends = counts.cumsum(0).int()
        both = add_bias(self.product(x, "w13", weights, ends), weights["w13_bias"], ends)
        inner = _ClampedSwiglu.apply(both, self.alpha, self.limit)
        return add_bias(self.product(inner, "w2", weights, ends), weights["w2_bias"], ends)


class _ClampedSwiglu(torch.autograd.Function):
    """Keeps only its input for backward: autograd would keep three times as much, operation by operation."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(both)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = both.chunk(2, -1)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(alpha * gate))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        clamped = gate.clamp(max=ctx.limit)
        open_ = torch.sigmoid(ctx.alpha * clamped)
        slope = open_ * (1 + ctx.alpha * clamped * (1 - open_))
        for_gate = grad * (up.clamp(-ctx.limit, ctx.limit) + 1) * slope * (gate <= ctx.limit)
        for_up = grad * clamped * open_ * (up.abs() <= ctx.limit)
        return torch.cat((for_gate, for_up), -1), None, None
