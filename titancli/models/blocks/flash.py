"""Flash attention by torch's own operators, for what `scaled_dot_product_attention` does not return or
accept: the log-sum-exp of each query, windows, queries that are the last of the keys, documents, and sinks.

A sink is a logit per head that takes part in the softmax but contributes no value. It can be added to
attention without it, given the output `out` and the log-sum-exp `lse` of its scores: the new log-sum-exp is
logaddexp(lse, sink), and the new output is `out` times exp(lse) over the exponential of that, which is
sigmoid(lse − sink). Backward of flash attention (arXiv 2307.08691, 3.1.2) recomputes the weights from the
log-sum-exp, and needs only Σ grad · out besides: given the new two, its gradients are those of attention with
the sink, and the sink's own is −exp(sink − lse') Σ grad · out', over all queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

if TYPE_CHECKING:
    from titancli.models.blocks.masks import Documents

_aten = torch.ops.aten


def runs_flash(device: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Return whether flash attention supports such heads on a GPU; narrower values are padded."""
    fits = value_dim <= head_dim and head_dim % 8 == 0 and head_dim <= 256
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and fits


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Return softmax(scale · q·kᵀ) · v over the keys that each query sees.

    Args:
        q: [B, S, heads, head_dim].
        k, v: [B, T, kv heads, head_dim].
        causal: whether a query sees keys only up to its own position, the last query being at the last key.
            On a CPU this requires S = T.
        window: with `causal`, the maximum number of keys that a query sees. None on a CPU.
        mask: [B or 1, 1, S, T] bool, without `causal`. None on a GPU.
        sinks: [heads].
        documents: with `causal` and S = T, what keeps a query to the keys of its document. None on a CPU.

    Returns:
        [B, S, heads, head_dim].
    """
    _, bounds, longest = (None, None, None) if documents is None else documents
    out, _ = attention_forward(q, k, v, sinks, mask, causal, window, scale, bounds, longest)
    return out


@torch.library.custom_op("titancli::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    bounds: Tensor | None = None,
    longest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output of `flash_attention`, and its log-sum-exp [B, heads, S] in fp32, including the
    sink. `bounds` and `longest` are those of the documents."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    more: dict[str, Any] = {"scale": scale, "bounds": bounds, "longest": longest}
    out, lse = flash(q, k, v, causal=causal, window=window, mask=mask, **more)
    if sinks is not None:
        whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out.mul_((lse - whole).exp()[..., None])  # in fp32, rounded once
        lse = whole
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@torch.library.custom_op("titancli::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    bounds: Tensor | None = None,
    longest: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    of = Queries(grad, q, out, lse)
    more: dict[str, Any] = {"scale": scale, "bounds": bounds, "longest": longest}
    grads = flash_backward(of, k, v, causal=causal, window=window, mask=mask, **more)
    grad_q, grad_k, grad_v = (x.transpose(1, 2).contiguous() for x in grads)
    return grad_q, grad_k, grad_v


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse)


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, mask, *how, bounds, longest = inputs
    ctx.save_for_backward(q, k, v, sinks, mask, bounds, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.how, ctx.longest = how, longest


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, mask, bounds, out, lse = ctx.saved_tensors
    grads = attention_backward(grad.contiguous(), q, k, v, out, lse, mask, *ctx.how, bounds, ctx.longest)
    for_sinks = None
    if sinks is not None and ctx.needs_input_grad[3]:
        shared = (grad * out).sum(-1, dtype=lse.dtype).transpose(1, 2)  # [B, heads, S]
        share = (sinks.to(lse.dtype)[:, None] - lse).exp()
        for_sinks = -(share * shared).sum((0, 2)).to(sinks.dtype)
    return *grads, for_sinks, None, None, None, None, None, None


attention_forward.register_autograd(_backward, setup_context=_keep)


def _pairs(
    q: Any, k: Any, window: int | None, scale: float, bounds: Any = None, longest: int | None = None
) -> int:
    """Return the number of query-key pairs over all heads, counted as torch does: the full rectangle,
    limited only by a window and by the longest document."""
    batch, length, heads, _ = q
    return int(batch * heads * length * min(k[1], window or k[1], longest or k[1]))


@register_flop_formula(torch.ops.titancli.attention_forward)
def _forward_flops(q: Any, k: Any, v: Any, sinks: Any, mask: Any, causal: Any, *how: Any, **out: Any) -> int:
    return 2 * 2 * _pairs(q, k, *how) * int(q[3])


@register_flop_formula(torch.ops.titancli.attention_backward)
def _backward_flops(
    grad: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, mask: Any, causal: Any, *how: Any, **out: Any
) -> int:
    return 5 * 2 * _pairs(q, k, *how) * int(q[3])


# -------------------------------------------------------------------------------- the operators of a device


class Queries(NamedTuple):
    """Inputs of backward for some queries, [B, heads, S, head_dim]; `out` and `lse` are over all keys."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    bounds: Tensor | None = None,
    longest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp [B, heads, S] fp32; q, k and v are [B, heads, S or T,
    head_dim], `bounds` and `longest` those of `titancli.models.blocks.masks.Documents`."""
    if q.device.type == "cpu" and bounds is None:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_added(mask, q), scale=scale
        )
    if window is None and bounds is None:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    lengths = (None, None, q.shape[2], k.shape[2]) if bounds is None else (bounds, bounds, longest, longest)
    rows = [_by_rows(x, bounds) for x in (q, k, v)]
    out, lse, *_ = _aten._flash_attention_forward(
        *rows, *lengths, 0.0, window is None, False, scale=scale, **_limits(window)
    )
    if bounds is not None:
        out, lse = out.unflatten(0, (q.shape[0], -1)), lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)
    return out.transpose(1, 2), lse


def flash_backward(
    of: Queries,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    bounds: Tensor | None = None,
    longest: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for these keys."""
    given = (of.grad, of.q, k, v, of.out, of.lse)
    if of.q.device.type == "cpu" and bounds is None:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, causal, attn_mask=_added(mask, of.q), scale=scale
        )
    lengths: Any = (None, None, of.q.shape[2], k.shape[2])
    # The state of a random generator, which is not read without dropout.
    state = torch.empty(2, dtype=torch.uint64, device=of.q.device)
    if window is None and bounds is None:
        return _aten._scaled_dot_product_flash_attention_backward(
            *given, *lengths, 0.0, causal, state, state, scale=scale
        )
    rows, lse = [_by_rows(x, bounds) for x in given[:5]], of.lse
    if bounds is not None:
        lse, lengths = lse.transpose(0, 1).flatten(1), (bounds, bounds, longest, longest)
    grads = _aten._flash_attention_backward(
        *rows, lse, *lengths, 0.0, window is None, state, state, scale=scale, **_limits(window)
    )
    if bounds is not None:
        grads = [x.unflatten(0, (of.q.shape[0], -1)) for x in grads]
    return tuple(x.transpose(1, 2) for x in grads)


def _by_rows(x: Tensor, bounds: Tensor | None) -> Tensor:
    """Turn [B, heads, S, head_dim] into [B, S, heads, head_dim]; for documents, [B * S, heads, head_dim]."""
    x = x.transpose(1, 2)
    return x if bounds is None else x.flatten(0, 1)


def _limits(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a bool mask as an additive one."""
    return None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
