"""Products of operands in low precision: torch's float8 kernel for groups, and operators that a plan counts.

torch has no shapes of `_scaled_grouped_mm` where there is no device, so its calls are operators of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_float8.formats import E4M3, Codes
from titancli.errors import TitanError
from titancli.models.blocks.declared import KEPT

_OUT = torch.bfloat16
"""The only dtype that torch's kernel writes."""


@torch.library.custom_op("titan_float8::grouped", mutates_args=())
def _grouped(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """[M, K], [M], [E, N, K], [E, N] to [M, N]."""
    if not len(x):
        return x.new_empty(0, weight.shape[1], dtype=dtype)
    out = torch._scaled_grouped_mm(
        x, weight.transpose(1, 2), x_scale, weight_scale, ends, out_dtype=_OUT, use_fast_accum=True
    )
    return out.to(dtype)


@_grouped.register_fake
def _(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1], dtype=dtype)


@torch.library.custom_op("titan_float8::outer", mutates_args=())
def _outer(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """[N, M], [E · N], [K, M], [E · K] to [E, N, K], 0 for empty groups."""
    if not left.shape[1]:
        return left.new_zeros(len(ends), left.shape[0], right.shape[0], dtype=dtype)
    out = torch._scaled_grouped_mm(
        left, right.t(), left_scale, right_scale, ends, out_dtype=_OUT, use_fast_accum=True
    )
    return out.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0.0).to(dtype)


@_outer.register_fake
def _(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[0], right.shape[0], dtype=dtype)


def grouped_on_hopper(left: Codes, right: Codes, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply float8 [M, K] with each group's [N, K] transposed, by torch's kernel."""
    return _grouped(left.data, left.scale.flatten(), right.data, right.scale.flatten(1), ends, dtype)


def outer_on_hopper(left: Codes, right: Codes, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply float8 [N, M] with [K, M] transposed, group by group, by torch's kernel; the ends of groups
    are multiples of 16."""
    by_group = [one.scale.t().contiguous().flatten() for one in (left, right)]
    return _outer(left.data, by_group[0], right.data, by_group[1], ends, dtype)


# ---------------------------------------------------------------------------------------------- for a plan


@torch.library.custom_op("titan_float8::planned", mutates_args=())
def _planned(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    ends: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Count a product by size and work alone: [M, K] with [N, K] or, of groups, [E, N, K] transposed; and of
    groups of columns, [N, M] with [K, M], where the first has as many columns as rows are grouped."""
    raise TitanError("a product that is only planned cannot be computed")


@_planned.register_fake
def _(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    ends: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    shape = (left.shape[0], right.shape[-2])
    grouped = ends is not None and right.ndim == 2
    return left.new_empty(*([ends.shape[0]] if grouped and ends is not None else []), *shape, dtype=dtype)


@register_flop_formula(torch.ops.titan_float8.planned, get_raw=True)
def _planned_flops(left: Any, left_scale: Any, right: Any, *rest: Any, **more: Any) -> int:
    each = 1 if left.dtype == E4M3 else 2  # of e2m1 two in a byte
    return int(2 * each * left.shape[0] * left.shape[1] * right.shape[-2])


@register_flop_formula(torch.ops.titan_float8.grouped)
def _grouped_flops(x: Any, x_scale: Any, weight: Any, *rest: Any, **more: Any) -> int:
    return 2 * x[0] * x[1] * weight[1]


@register_flop_formula(torch.ops.titan_float8.outer)
def _outer_flops(left: Any, left_scale: Any, right: Any, *rest: Any, **more: Any) -> int:
    return 2 * left[0] * left[1] * right[0]


def planned(left: Codes, right: Codes, dtype: torch.dtype, ends: Tensor | None = None) -> Tensor:
    """Stand in for a product of [M, K] with [N, K] transposed."""
    return _planned(_typed(left), left.scale, _typed(right), right.scale, ends, dtype)


def planned_grouped(left: Codes, right: Codes, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Stand in for a product of experts."""
    return planned(left, right, dtype, ends)


def planned_outer(left: Codes, right: Codes, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Stand in for the gradient of experts' matrices."""
    return planned(left, right, dtype, ends)


def _typed(codes: Codes) -> Tensor:
    """Return the numbers in a dtype that tells their size."""
    return codes.data if codes.data.dtype == E4M3 else codes.data.view(torch.float4_e2m1fn_x2)


KEPT.update((_grouped._opoverload, _planned._opoverload))
