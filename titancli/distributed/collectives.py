"""Collectives that autograd and torch.compile see through, for code that works on local tensors.

Whether a gradient is summed over the ranks or cut follows from who uses the result. Ranks that compute
different things with a gathered tensor each have a part of its gradient: they are summed. Ranks that compute
the same have the whole of it each: it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The data of a process group that a compiled graph may hold."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Group:
        return cls(group.group_name, group.size(), group.rank())


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Gather the pieces of all ranks along `dim`, for ranks that then compute different things with them.

    Backward sums the gradients over the ranks and keeps this rank's piece (reduce-scatter).
    """
    return _Gather.apply(x, dim, group.name, group.size)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum over all ranks and keep this rank's piece along `dim`; backward gathers."""
    return _ReduceScatter.apply(x, dim, group.name, group.size)


def gather_same(x: Tensor, dim: int, group: Group) -> Tensor:
    """Gather the pieces of all ranks along `dim`, for ranks that then compute the same with them.

    Backward keeps this rank's piece of the gradient.
    """
    return _GatherSame.apply(x, dim, group.name, group.size, group.rank)


def sum_same(x: Tensor, group: Group) -> Tensor:
    """Sum over all ranks, which then compute the same with it; backward passes the gradient on unchanged."""
    return _SumSame.apply(x, group.name)


def all_to_all(
    x: Tensor, group: Group, output_splits: list[int] | None = None, input_splits: list[int] | None = None
) -> Tensor:
    """Exchange rows between all ranks along dim 0; in even splits if none are given."""
    even = [x.shape[0] // group.size] * group.size
    return _AllToAll.apply(x, output_splits or even, input_splits or even, group.name)


def all_reduce(x: Tensor, op: str, group: Group) -> Tensor:
    """Return the "sum" or "max" over all ranks, without gradient."""
    return _wait(_ops.all_reduce(x.detach(), op, group.name))


def _wait(x: Tensor) -> Tensor:
    return _ops.wait_tensor(x)


def _all_gather(x: Tensor, dim: int, name: str, size: int) -> Tensor:
    joined = _wait(_ops.all_gather_into_tensor(x.contiguous(), size, name))
    if x.shape[:dim].numel() == 1:  # the pieces lie in memory as they are wanted: one row along its sequence
        return joined.view(*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(joined.chunk(size), dim)


def _sum_pieces(x: Tensor, dim: int, name: str, size: int) -> Tensor:
    if x.shape[:dim].numel() == 1:
        stacked = x.contiguous().view(size, *x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
        stacked = stacked.flatten(0, 1)
    else:
        stacked = torch.cat(x.chunk(size, dim))
    return _wait(_ops.reduce_scatter_tensor(stacked.contiguous(), "sum", size, name))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, name: str, size: int) -> Tensor:
        ctx.group = (dim, name, size)
        return _all_gather(x, dim, name, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum_pieces(grad, *ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, name: str, size: int) -> Tensor:
        ctx.group = (dim, name, size)
        return _sum_pieces(x, dim, name, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_gather(grad, *ctx.group), None, None, None


class _GatherSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, name: str, size: int, rank: int) -> Tensor:
        ctx.place = (dim, size, rank)
        return _all_gather(x, dim, name, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dim, size, rank = ctx.place
        return grad.chunk(size, dim)[rank].contiguous(), None, None, None, None


class _SumSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        return _wait(_ops.all_reduce(x, "sum", name))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, output_splits: list[int], input_splits: list[int], name: str) -> Tensor:
        ctx.splits = (input_splits, output_splits, name)
        return _wait(_ops.all_to_all_single(x.contiguous(), output_splits, input_splits, name))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input_splits, output_splits, name = ctx.splits
        back = _wait(_ops.all_to_all_single(grad.contiguous(), input_splits, output_splits, name))
        return back, None, None, None
