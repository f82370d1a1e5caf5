"""Products of groups of rows with one matrix per group, as torch operators.

torch's `grouped_mm` has no float32 shapes on meta and fake tensors, so it cannot be traced, planned or
counted there; its backward rejects gradients that are not contiguous. On a GPU it has a kernel for bfloat16
alone: in float32 the host waits for `ends`. These operators add shapes, gradients and FLOP counts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("titancli::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix, as `linear` does.

    Args:
        x: [N, in], group after group.
        weight: [E, out, in].
        ends: [E] int32, the end of each group in x; a group may be empty.

    Returns:
        [N, out].
    """
    if not len(x):  # an empty tensor may have strides that grouped_mm rejects
        return x.new_empty(0, weight.shape[1])
    return grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)


@torch.library.custom_op("titancli::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Sum the outer products of rows per group: [N, out], [N, in] to [E, out, in]; 0 for empty groups."""
    if not len(left):
        return left.new_zeros(len(ends), left.shape[1], right.shape[1])
    out = grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends)
    if leaves_empty_groups(out.device):
        out.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0.0)
    return out


@cache
def leaves_empty_groups(device: torch.device) -> bool:
    """Return whether the device's kernel leaves the result of empty groups uninitialized instead of zero,
    as on GPUs from Blackwell on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    for_x, for_weight, _ = ctx.needs_input_grad
    return (
        grouped_linear(grad, weight.transpose(1, 2), ends) if for_x else None,
        grouped_outer(grad, x, ends) if for_weight else None,
        None,
    )


grouped_linear.register_autograd(_backward, setup_context=_keep)


def add_bias(x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Add each group's bias to its rows.

    Args:
        x: [N, out], group after group.
        bias: [E, out].
        ends: [E] int32, the end of each group in x; a group may be empty.

    Returns:
        [N, out].
    """
    return _AddBias.apply(x, bias, ends)


class _AddBias(torch.autograd.Function):
    """Forward uses plain operations, so that a compiler fuses them with what follows; backward is a matrix
    product, since summing rows one by one is slow, and nondeterministic on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        group = torch.searchsorted(ends, torch.arange(len(x), device=x.device, dtype=torch.int32), right=True)
        return bias.index_select(0, group).add_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (ends,) = ctx.saved_tensors
        ones = grad.new_ones(len(grad), _ONES)
        return grad, grouped_outer(ones, grad, ends)[:, 0], None


_ONES = 8
"""Rows of ones where one would do: the products need multiples of eight."""


@register_flop_formula(torch.ops.titancli.grouped_linear)
def _linear_flops(x: Any, weight: Any, ends: Any, *, out_shape: Any = None, **rest: Any) -> int:
    return 2 * x[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.titancli.grouped_outer)
def _outer_flops(left: Any, right: Any, ends: Any, *, out_shape: Any = None, **rest: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
