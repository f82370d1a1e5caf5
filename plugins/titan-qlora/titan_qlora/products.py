"""Products with weights in NF4: backward makes the values again, and keeps no copy of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titancli.models.blocks.grouped import grouped_linear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.values(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        for_x, _, for_bias = ctx.needs_input_grad
        return (
            grad @ weight.values() if for_x else None,
            None,
            grad.flatten(0, -2).sum(0) if for_bias else None,
        )


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, ends: Tensor) -> Tensor:
        ctx.save_for_backward(weight, ends)
        return grouped_linear(x, weight.values(), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        weight, ends = ctx.saved_tensors
        return grouped_linear(grad, weight.values().transpose(1, 2), ends), None, None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = _Linear.apply(input, weight, bias)
    return found


PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.ops.titancli.grouped_linear.default: _Grouped.apply,
}
"""By torch's function."""
