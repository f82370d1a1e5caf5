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

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titancli.distributed.collectives import Group
from titancli.errors import TitanError
from titancli.models.blocks.flash import Queries, flash, flash_backward

_collective = torch.ops._c10d_functional


def runs_here(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there is a flash kernel that returns the log-sum-exp."""
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
            f"the ring needs keys and values of the same size, not heads of {k.shape[-1]} and {v.shape[-1]}",
            hint='set parallelize.context_parallel = "allgather"',
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ring_forward(q, k, v, group.name, group.size, group.rank)[0].transpose(1, 2)


# One operator and not its parts, so that checkpointing by op keeps the result and not that of every step.
@torch.library.custom_op("titancli::ring_forward", mutates_args=())
def ring_forward(q: Tensor, k: Tensor, v: Tensor, name: str, size: int, rank: int) -> tuple[Tensor, Tensor]:
    """On [B, heads, S / cp, head_dim]: the output, and the log-sum-exp [B, heads, S / cp] fp32."""
    travelling, q_tail = torch.stack((k, v)), q.chunk(2, 2)[1]
    coming = _send(travelling, name, size, rank)
    out, lse = flash(q, k, v, causal=True)
    (head, tail), (head_lse, tail_lse) = out.float().chunk(2, 2), lse.chunk(2, 2)
    for step in range(1, size):
        travelling = _collective.wait_tensor(coming)
        if step < size - 1:  # under way while this rank computes
            coming = _send(travelling, name, size, rank)
        if step <= rank:  # of a rank before this one
            out, lse = flash(q, *travelling.chunk(2, 3)[0].unbind(), causal=False)
            (early, late), (early_lse, late_lse) = out.chunk(2, 2), lse.chunk(2, 2)
            head, head_lse = _merge(head, head_lse, early, early_lse)
        else:
            late, late_lse = flash(q_tail, *travelling.unbind(), causal=False)
        tail, tail_lse = _merge(tail, tail_lse, late, late_lse)
    out, lse = torch.cat((head, tail), 2).to(q.dtype), torch.cat((head_lse, tail_lse), 2)
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("titancli::ring_backward", mutates_args=())
def ring_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, name: str, size: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    whole = Queries(grad, q, out, lse)
    tails = Queries(*(x.chunk(2, 2)[1].contiguous() for x in whole))
    travelling = torch.stack((k, v))
    coming = _send(travelling, name, size, rank)
    grad_q, *grads = flash_backward(whole, k, v, causal=True)
    grad_q, summed = grad_q.float(), torch.stack(grads).float()
    for step in range(1, size):
        travelling = _collective.wait_tensor(coming)
        if step < size - 1:
            coming = _send(travelling, name, size, rank)
        # The gradients of keys and values go with them, each rank adding its own.
        arriving = _send(summed, name, size, rank)
        if step <= rank:
            part_q, *grads = flash_backward(whole, *travelling.chunk(2, 3)[0].unbind(), causal=False)
            part = torch.stack(grads)
            part = torch.cat((part, torch.zeros_like(part)), 3)
        else:
            part_q, *grads = flash_backward(tails, *travelling.unbind(), causal=False)
            part_q = torch.cat((torch.zeros_like(part_q), part_q), 2)
            part = torch.stack(grads)
        grad_q, summed = grad_q + part_q, _collective.wait_tensor(arriving) + part
    summed = _collective.wait_tensor(_send(summed, name, size, rank))  # home again
    grad_k, grad_v = summed.to(k.dtype).unbind()
    return grad_q.to(q.dtype).contiguous(), grad_k.contiguous(), grad_v.clone()


@ring_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, name: str, size: int, rank: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@ring_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, name: str, size: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *group = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.group = group


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    return *ring_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.group), None, None, None


ring_forward.register_autograd(_backward, setup_context=_keep)


def _pairs(q: Any, size: int) -> int:
    """Return the number of pairs of queries and keys over all heads; a rank's own make a square, as torch
    counts causal attention."""
    batch, heads, length, _ = q
    return batch * heads * length * length * (size + 1) // 2


@register_flop_formula(torch.ops.titancli.ring_forward)
def _forward_flops(q: Any, k: Any, v: Any, name: str, size: int, *rest: Any, **more: Any) -> int:
    return 2 * 2 * _pairs(q, size) * q[3]


@register_flop_formula(torch.ops.titancli.ring_backward)
def _backward_flops(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, name: str, size: int, *rest: Any, **more: Any
) -> int:
    return 5 * 2 * _pairs(q, size) * q[3]


def _send(x: Tensor, name: str, size: int, rank: int) -> Tensor:
    """This rank's to the rank after it, for that of the rank before it; to be waited for."""
    to, from_ = [0] * size, [0] * size
    to[(rank + 1) % size] = from_[(rank - 1) % size] = x.shape[0]
    return _collective.all_to_all_single(x.contiguous(), from_, to, name)


def _merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys out of attention over each, in fp32."""
    lse = torch.logaddexp(a_lse, b_lse)
    return a * (a_lse - lse).exp()[..., None] + b * (b_lse - lse).exp()[..., None], lse
