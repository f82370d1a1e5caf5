"""Ring attention: keys and values go round the ranks of a group while each attends to those it has.

Rows are cut head-tail (`titancli.parallel.context`), so a rank has an early and a late piece, and what there
is to see between two ranks is never half a piece:

- its own keys: causal, for the pieces lie in their order;
- keys of a rank before it: both of its pieces see that rank's early piece, and no more;
- keys of a rank after it: its late piece sees both, its early piece neither.

That is the same work at every step. The parts are merged by their log-sum-exp; backward sends keys and values
round once more, and their gradients with them. Source: Ring Attention (arXiv 2310.01889), with the blockwise
kernels of FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titancli.errors import TitanError
from titancli.parallel.collectives import Group

_aten = torch.ops.aten
_collective = torch.ops._c10d_functional


def runs_here(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a flash kernel that tells the log-sum-exp."""
    return device.type == "cpu" or (device.type == "cuda" and dtype in (torch.bfloat16, torch.float16))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Causal attention of rows that are cut head-tail over a group.

    Args:
        q: [B, S / cp, heads, head_dim], this rank's part.
        k, v: [B, S / cp, kv heads, head_dim].

    Returns:
        [B, S / cp, heads, head_dim].

    Raises:
        TitanError: keys and values differ in head_dim.
    """
    if k.shape != v.shape:
        raise TitanError(
            f"the ring takes keys and values of one size, not heads of {k.shape[-1]} and {v.shape[-1]}",
            hint='write parallelize.context_parallel = "allgather"',
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _Ring.apply(q, k, v, group.name, group.size, group.rank).transpose(1, 2)


class _Ring(torch.autograd.Function):
    """On [B, heads, S / cp, head_dim]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, name: str, size: int, rank: int) -> Tensor:
        travelling, q_tail = torch.stack((k, v)), q.chunk(2, 2)[1]
        coming = _send(travelling, name, size, rank)
        out, lse, seeds = _flash(q, k, v, causal=True)
        (head, tail), (head_lse, tail_lse) = out.float().chunk(2, 2), lse.chunk(2, 2)
        for step in range(1, size):
            travelling = _collective.wait_tensor(coming)
            if step < size - 1:  # under way while this rank computes
                coming = _send(travelling, name, size, rank)
            if step <= rank:  # of a rank before this one
                out, lse, _ = _flash(q, *travelling.chunk(2, 3)[0].unbind(), causal=False)
                (early, late), (early_lse, late_lse) = out.chunk(2, 2), lse.chunk(2, 2)
                head, head_lse = _merge(head, head_lse, early, early_lse)
            else:
                late, late_lse, _ = _flash(q_tail, *travelling.unbind(), causal=False)
            tail, tail_lse = _merge(tail, tail_lse, late, late_lse)
        out, lse = torch.cat((head, tail), 2).to(q.dtype), torch.cat((head_lse, tail_lse), 2)
        ctx.save_for_backward(q, k, v, out, lse, *seeds)
        ctx.group = (name, size, rank)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, *seeds = ctx.saved_tensors
        name, size, rank = ctx.group
        whole = _Queries(grad, q, out, lse)
        tails = _Queries(*(x.chunk(2, 2)[1].contiguous() for x in whole))
        travelling = torch.stack((k, v))
        coming = _send(travelling, name, size, rank)
        grad_q, *grads = _flash_backward(whole, k, v, seeds, causal=True)
        grad_q, summed = grad_q.float(), torch.stack(grads).float()
        for step in range(1, size):
            travelling = _collective.wait_tensor(coming)
            if step < size - 1:
                coming = _send(travelling, name, size, rank)
            # The gradients of keys and values go with them, each rank adding its own.
            arriving = _send(summed, name, size, rank)
            if step <= rank:
                k, v = travelling.chunk(2, 3)[0].unbind()
                part_q, *grads = _flash_backward(whole, k, v, seeds, causal=False)
                part = torch.stack(grads)
                part = torch.cat((part, torch.zeros_like(part)), 3)
            else:
                k, v = travelling.unbind()
                part_q, *grads = _flash_backward(tails, k, v, seeds, causal=False)
                part_q = torch.cat((torch.zeros_like(part_q), part_q), 2)
                part = torch.stack(grads)
            grad_q, summed = grad_q + part_q, _collective.wait_tensor(arriving) + part
        summed = _collective.wait_tensor(_send(summed, name, size, rank))  # home again
        grad_k, grad_v = summed.to(k.dtype).unbind()
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _send(x: Tensor, name: str, size: int, rank: int) -> Tensor:
    """This rank's to the rank after it, for that of the rank before it; to be waited for."""
    to, from_ = [0] * size, [0] * size
    to[(rank + 1) % size] = from_[(rank - 1) % size] = x.shape[0]
    return _collective.all_to_all_single(x.contiguous(), from_, to, name)


def _merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys out of attention over each, in fp32."""
    lse = torch.logaddexp(a_lse, b_lse)
    return a * (a_lse - lse).exp()[..., None] + b * (b_lse - lse).exp()[..., None], lse


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, log-sum-exp [B, heads, S] fp32, and what backward wants to be given back."""
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse, []
    found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return found[0], found[1], [found[6], found[7]]


class _Queries(NamedTuple):
    """What backward knows of some queries; `out` and `lse` are those over all keys."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


def _flash_backward(
    of: _Queries, k: Tensor, v: Tensor, seeds: list[Tensor], *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for these keys."""
    given = (of.grad, of.q, k, v, of.out, of.lse)
    if of.q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal)
    lengths = (None, None, of.q.shape[2], k.shape[2])  # none: rows of one length
    return _aten._scaled_dot_product_flash_attention_backward(*given, *lengths, 0.0, causal, *seeds)
