"""Products in low precision, forward and backward: of a linear layer, and of experts.

Of the three products of a layer each multiplies two operands along their last dimension: `x @ weight.T`,
`grad @ weight` and `grad.T @ x`. Each is cast along the dimension that is summed over, so a tensor is cast
anew for each of its products. `grad.T @ x` sums over tokens: of experts over those of one, so that no block
and no scale reaches from one expert's tokens to another's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from titan_float8 import formats
from titan_float8.formats import Codes, Padded
from titan_float8.kernels import grouped_on_hopper, outer_on_hopper, planned, planned_grouped, planned_outer
from titan_float8.scheme import Cut, Role, Scheme
from titancli.distributed.collectives import Group, all_reduce
from titancli.models.blocks.grouped import grouped_linear, grouped_outer

# ------------------------------------------------------------------------------------------ linear layers


def product(x: Tensor, weight: Tensor, scheme: Scheme, cut: Cut | None = None) -> Tensor:
    """Multiply as `linear` does: […, K], [N, K] to […, N]; of shards, if cut."""
    if scheme.kernel == "torchao":
        from titan_float8.blackwell import product as on_blackwell

        return on_blackwell(x, weight, scheme)
    return _Product.apply(x, weight, scheme, cut)


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scheme: Scheme, cut: Cut | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scheme, ctx.cut = scheme, cut
        rows = x.reshape(-1, x.shape[-1])
        out = _multiply(
            scheme, _cast(rows, "input", scheme, cut), _cast(weight, "weight", scheme, cut), x.dtype
        )
        return out.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, weight), scheme, cut = ctx.saved_tensors, ctx.scheme, ctx.cut
        rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        for_x = for_weight = None
        if ctx.needs_input_grad[0]:
            left, right = _cast(grad, "grad", scheme, cut), _cast(weight.t(), "weight", scheme, cut)
            for_x = _multiply(scheme, left, right, x.dtype).reshape(x.shape)
        if ctx.needs_input_grad[1] and scheme.plain_grad_weight:
            for_weight = grad.t() @ rows
        elif ctx.needs_input_grad[1]:
            left = _cast(_over_tokens(grad, scheme), "grad", scheme, cut, cut_dim=0)
            right = _cast(_over_tokens(rows, scheme), "input", scheme, cut)
            for_weight = _multiply(scheme, left, right, x.dtype)
        return for_x, for_weight, None, None


def _cast(x: Tensor, role: Role, scheme: Scheme, cut: Cut | None, cut_dim: int = -1) -> Codes:
    largest = None
    if scheme.format == "nvfp4":
        largest = x.abs().amax().float()
        if cut is not None and getattr(cut, role):
            largest = all_reduce(largest, "max", Group(cut.name, cut.size, cut.rank))
    return scheme.cast(x.contiguous(), role, largest, cut=cut, cut_dim=cut_dim)


def _over_tokens(x: Tensor, scheme: Scheme) -> Tensor:
    """Transpose [tokens, K] for a product that sums over tokens; zeros fill up the last block."""
    x = pad(x.t(), (0, -len(x) % scheme.block)) if len(x) % scheme.block else x.t().contiguous()
    return formats.turned(x) if scheme.hadamard else x


def _multiply(scheme: Scheme, left: Codes, right: Codes, dtype: torch.dtype) -> Tensor:
    """Multiply [M, K] with [N, K] transposed."""
    if scheme.kernel == "planned":
        return planned(left, right, dtype)
    return linear(left.dequantized(dtype), right.dequantized(dtype))


# ------------------------------------------------------------------------------------------------ experts


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, scheme: Scheme) -> Tensor:
    """Multiply each expert's tokens with its matrix: [M, K], [E, N, K] to [M, N]."""
    if scheme.kernel == "torchao":
        from titan_float8.blackwell import grouped_product as on_blackwell

        return on_blackwell(x, weight, ends, scheme)
    return _Grouped.apply(x, weight, ends, scheme)


@torch._dynamo.allow_in_graph
class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, scheme: Scheme) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.scheme = scheme
        return _grouped(_tokens(x, "input", ends, scheme), _experts(weight, scheme), ends, scheme, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, weight, ends), scheme = ctx.saved_tensors, ctx.scheme
        grad = grad.contiguous()
        for_x = for_weight = None
        if ctx.needs_input_grad[0]:
            left, right = _tokens(grad, "grad", ends, scheme), _experts(weight.transpose(1, 2), scheme)
            for_x = _grouped(left, right, ends, scheme, x.dtype)
        if ctx.needs_input_grad[1] and scheme.plain_grad_weight:
            for_weight = grouped_outer(grad, x, ends)
        elif ctx.needs_input_grad[1]:
            padded = Padded.of(ends, len(x), scheme.block)
            left = _over_groups(grad, "grad", padded, scheme)
            right = _over_groups(x, "input", padded, scheme)
            for_weight = _outer(left, right, padded.ends, scheme, x.dtype)
        return for_x, for_weight, None, None


def _tokens(x: Tensor, role: Role, ends: Tensor, scheme: Scheme) -> Codes:
    """Cast [M, K] along K; NVFP4's first factor is that of the expert's tokens."""
    largest = None
    if scheme.format == "nvfp4":
        at = torch.arange(len(x), device=ends.device, dtype=torch.int32)
        group = torch.searchsorted(ends, at, right=True)
        maxima = formats.group_maxima(x.abs().amax(-1)[None], group, len(ends))
        largest = maxima[0].index_select(0, group)[:, None]
    return scheme.cast(x.contiguous(), role, largest)


def _experts(weight: Tensor, scheme: Scheme) -> Codes:
    """Cast [E, N, K] along K; NVFP4's first factor is that of the expert."""
    largest = weight.abs().amax((1, 2), keepdim=True) if scheme.format == "nvfp4" else None
    return scheme.cast(weight.contiguous(), "weight", largest)


def _over_groups(x: Tensor, role: Role, padded: Padded, scheme: Scheme) -> Codes:
    """Cast [M, K] along the tokens of each expert, transposed: [K, rows]."""
    x = padded.fill(x).t().contiguous()
    if scheme.hadamard:
        x = formats.turned(x)
    experts = len(padded.ends)
    if scheme.format == "rowwise":
        return scheme.cast(x, role, group=padded.group, groups=experts)
    largest = None
    if scheme.format == "nvfp4":
        maxima = formats.group_maxima(x.abs().amax(0)[None], padded.group, experts)
        largest = maxima.index_select(1, padded.group[:: scheme.block])
    return scheme.cast(x, role, largest)


def _grouped(left: Codes, right: Codes, ends: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Multiply [M, K] with each expert's [N, K] transposed."""
    if scheme.kernel != "emulated":
        run: Callable[..., Tensor] = grouped_on_hopper if scheme.kernel == "hopper" else planned_grouped
        return run(left, right, ends, dtype)
    return grouped_linear(left.dequantized(dtype), right.dequantized(dtype), ends)


def _outer(left: Codes, right: Codes, ends: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Multiply [N, rows] with [K, rows] transposed, group by group: [E, N, K]."""
    if scheme.kernel != "emulated":
        run: Callable[..., Tensor] = outer_on_hopper if scheme.kernel == "hopper" else planned_outer
        return run(left, right, ends, dtype)
    return grouped_outer(left.dequantized(dtype).t(), right.dequantized(dtype).t(), ends)
