"""The gated delta rule in chunks, as a differentiable torch operator.

A head keeps a matrix S of keys by values, and goes through its row token by token:

    S ← exp(g) · S,   S ← S + k ⊗ β · (v − Sᵀk),   out = Sᵀq / √(key width)

with q and k of length 1. Within a chunk of tokens, all of this is a few matrix products and one triangular
solve; only the states between chunks are computed in order. Intermediates are recomputed in backward, since
they take many times the memory of the inputs.

Sources: Gated Delta Networks (arXiv 2412.06464); the chunks, arXiv 2406.06484.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from titancli.models.blocks.declared import declare_operator

CHUNK = 64
"""Tokens per chunk."""
WORKING = 256 * 2**20
"""Bytes of temporaries that a call may take."""
EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


@torch.library.custom_op("titan_qwen3_next::gated_delta_rule", mutates_args=())
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    begins: Tensor | None,
    state: Tensor | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return the heads' outputs at each token, and their states after the last; computed in fp32 or more.

    Args:
        q, k: [B, S, key heads, K].
        v: [B, S, key heads, R, V]: R heads share a query and a key.
        log_decay: [B, S, key heads, R] fp32, g above, at most 0.
        beta: [B, S, key heads, R], β above.
        begins: [B, S] bool, the first token of each document, where the state is reset; None: the row
            continues from `state`.
        state: [B, key heads, R, K, V] before the first token; None: zeros.
        chunk: tokens that are computed together.

    Returns:
        [B, S, key heads, R, V] in v's dtype, and [B, key heads, R, K, V].
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    out, last = v.new_empty(v.shape), v.new_empty(_state_shape(k, v), dtype=wide)
    for heads in _slices(k, v, chunk, 1):
        mine = [x[:, :, heads] for x in (q, k, v, log_decay, beta)]
        first = None if state is None else state[:, heads]
        out[:, :, heads], last[:, heads] = _read(mine, begins, first, chunk)
    return out, last


def _read(
    given: Sequence[Tensor], begins: Tensor | None, first: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule` for some key heads. Temporaries are freed before the next heads."""
    row = _Row.of(given, begins, chunk)
    states = row.states(first)
    return _tokens(row.read(states[..., :-1, :, :]), given[0].shape[1]), states[..., -1, :, :]


@torch.library.custom_op("titan_qwen3_next::gated_delta_rule_backward", mutates_args=())
def gated_delta_rule_backward(
    grad: Tensor,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    begins: Tensor | None,
    state: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay, beta, and of the state before the first token."""
    wide = torch.promote_types(v.dtype, torch.float32)
    inputs = (q, k, v, log_decay, beta)
    made = [x.new_empty(x.shape) for x in inputs]
    first = v.new_empty(_state_shape(k, v), dtype=wide)
    for heads in _slices(k, v, chunk, 2):
        mine = [x[:, :, heads] for x in inputs]
        before, after = (None if x is None else x[:, heads] for x in (state, grad_state))
        found, first[:, heads] = _gradients(mine, begins, before, grad[:, :, heads], after, chunk)
        for whole in made:
            whole[:, :, heads] = found.pop(0)  # freed before the next heads
    return (*made, first)  # type: ignore[return-value]


def _gradients(
    given: Sequence[Tensor],
    begins: Tensor | None,
    state: Tensor | None,
    grad: Tensor,
    grad_state: Tensor | None,
    chunk: int,
) -> tuple[list[Tensor], Tensor]:
    """Compute `gated_delta_rule_backward` for some key heads."""
    row, (q, k, *_) = _Row.of(given, begins, chunk), given
    states = row.states(state)
    *found, first = row.gradients(_chunks(grad, row.q.dtype, row.size), grad_state, states)
    found = [_tokens(x, q.shape[1]) for x in found]
    found[0] = _normed_backward(found[0].squeeze(3), q, q.shape[-1] ** -0.5)
    found[1] = _normed_backward(found[1].squeeze(3), k, 1.0)
    return found, first


def _slices(k: Tensor, v: Tensor, chunk: int, passes: int) -> list[slice]:
    """Return slices of key heads to compute together, such that temporaries take at most `WORKING` bytes,
    or those of a single head."""
    wide = torch.promote_types(v.dtype, torch.float32).itemsize
    width, size = k.shape[-1] + v.shape[-1], max(1, min(chunk, k.shape[1]))
    of_token = 6 * width + 6 * size + 2 * k.shape[-1] * width / size
    each = max(1, int(WORKING / (v[:, :, 0, :, 0].numel() * of_token * wide * passes + 1)))
    return [slice(at, at + each) for at in range(0, k.shape[2], each)]


def _state_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
    return (v.shape[0], *v.shape[2:4], k.shape[-1], v.shape[-1])


@gated_delta_rule.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    begins: Tensor | None,
    state: Tensor | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(v.dtype, torch.float32)
    return v.new_empty(v.shape), v.new_empty(_state_shape(k, v), dtype=wide)


@gated_delta_rule_backward.register_fake
def _(
    grad: Tensor,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    begins: Tensor | None,
    state: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(v.dtype, torch.float32)
    first = v.new_empty(_state_shape(k, v), dtype=wide)
    q, k, v, log_decay, beta = (x.new_empty(x.shape) for x in (q, k, v, log_decay, beta))
    return q, k, v, log_decay, beta, first


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors  # read once: checkpointing hands them out a single time
    *found, first = gated_delta_rule_backward(grad, grad_state, *kept, ctx.chunk)
    return (*found, None, None if kept[-1] is None else first, None)


gated_delta_rule.register_autograd(_backward, setup_context=_keep)
declare_operator(gated_delta_rule, gated_delta_rule_backward)


@register_flop_formula(torch.ops.titan_qwen3_next.gated_delta_rule)
def _flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """Return the FLOPs of the rule itself: a decayed state is read by a key, written, and read by a query."""
    return 6 * math.prod(v) * k[-1]


@register_flop_formula(torch.ops.titan_qwen3_next.gated_delta_rule_backward)
def _backward_flops(grad: Any, state: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None) -> int:
    return 2 * _flops(q, k, v)


class _Row(NamedTuple):
    """Rows in chunks: [B, key heads, R or 1, chunks, …]. C is the tokens of a chunk, K and V the widths."""

    q: Tensor
    """[…, C, K], of unit length and scaled."""
    k: Tensor
    v: Tensor
    beta: Tensor
    """[…, C, 1]."""
    since: Tensor
    """[…, C, 1]: decay of the state before the chunk up to each token; 0 after a document has begun."""
    until: Tensor
    """[…, C, 1]: decay of each token's contribution up to the chunk's end; 0 if a document begins after
    it."""
    between: Tensor
    """[…, C, C]: decay from a column's token to a row's, 0 above the diagonal and across documents."""
    alike: Tensor
    """[…, C, C]: products of keys."""
    system: Tensor
    """[…, C, C]: below the diagonal, how each token's correction depends on earlier ones."""
    scores: Tensor
    """[…, C, C]: weights with which each token reads the corrections."""
    values: Tensor
    """[…, C, V]: corrections that tokens would make to an empty state."""
    reads: Tensor
    """[…, C, K]: what is subtracted from these, as a factor of the state before the chunk."""

    @classmethod
    def of(cls, given: Sequence[Tensor], begins: Tensor | None, chunk: int) -> _Row:
        """Split q, k, v, log_decay and beta into chunks, and compute everything that does not depend on
        the states."""
        q, k, v, log_decay, beta = given
        size = max(1, min(chunk, q.shape[1]))
        wide = torch.promote_types(v.dtype, torch.float32)
        q = _normed(_chunks(q[:, :, :, None], wide, size), q.shape[-1] ** -0.5)
        k = _normed(_chunks(k[:, :, :, None], wide, size), 1.0)
        v = _chunks(v, wide, size)
        rate, decay = (_chunks(x, wide, size) for x in (beta, log_decay))
        within = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        # Summed from each token on: differences of sums from the chunk's first token would lose small values.
        each = decay[..., :, None].expand(*decay.shape, size)
        between = each.masked_fill(~within.tril(-1), 0.0).cumsum(-2)
        since, until = decay.cumsum(-1).exp(), between[..., -1, :].exp()
        if begins is not None:
            document = _chunks(begins[:, :, None, None], torch.int64, size)
            document = document.flatten(3).cumsum(-1).view_as(document)
            before = pad(document[..., :-1, -1:], (0, 0, 1, 0))
            within = within & (document[..., :, None] == document[..., None, :])
            since = since * (document == before)
            until = until * (document == document[..., -1:])
        between = between.exp() * within
        rate, since, until = rate[..., None], since[..., None], until[..., None]
        alike = k @ k.mT
        system = rate * alike * between
        both = torch.cat((rate * v, rate * since * k), -1)
        both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        values, reads = both.split((v.shape[-1], k.shape[-1]), -1)
        scores = (q @ k.mT) * between
        return cls(q, k, v, rate, since, until, between, alike, system, scores, values, reads)

    @property
    def size(self) -> int:
        return self.q.shape[-2]

    def step(self) -> Tensor:
        """Return […, K, K], the linear map from the state before a chunk to its part of the state after."""
        kept = self.since[..., -1:, :] * torch.eye(self.k.shape[-1], dtype=self.k.dtype, device=self.k.device)
        return kept - (self.until * self.k).mT @ self.reads

    def states(self, first: Tensor | None) -> Tensor:
        """Return […, chunks + 1, K, V], the states before the first chunk and after each."""
        return _in_order(self.step(), (self.until * self.k).mT @ self.values, first)

    def read(self, states: Tensor) -> Tensor:
        """Return the outputs […, C, V], given the states before the chunks."""
        return (self.since * self.q) @ states + self.scores @ (self.values - self.reads @ states)

    def gradients(self, grad: Tensor, grad_state: Tensor | None, states: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, decay, beta and the first state, given those of the outputs,
        […, C, V], and of the last state."""
        q, k, v, beta, since, until, between, *_ = self
        # Of the states: the same recurrence, backwards.
        additions = (since * q).mT @ grad - self.reads.mT @ (self.scores.mT @ grad)
        back = _in_order(self.step().mT.flip(3), additions.flip(3), grad_state).flip(3)
        after, before = back[..., 1:, :, :], states[..., :-1, :, :]
        corrections = self.values - self.reads @ before
        for_values = self.scores.mT @ grad + (until * k) @ after
        for_reads = -for_values @ before.mT
        # Of the triangular system.
        both = torch.cat((for_values, for_reads), -1)
        both = torch.linalg.solve_triangular(self.system.mT, both, upper=True, unitriangular=True)
        for_v, for_k = both.split((v.shape[-1], k.shape[-1]), -1)
        for_system = -(for_v @ self.values.mT + for_k @ self.reads.mT).tril(-1)
        # Of its inputs.
        for_scores = grad @ corrections.mT
        read, wrote = grad @ before.mT, corrections @ after.mT
        products = (for_scores * between).sum(2, keepdim=True)
        alike = (beta * for_system * between).sum(2, keepdim=True)
        for_q = products @ k + (since * read).sum(2, keepdim=True)
        for_key = products.mT @ q + (alike + alike.mT) @ k
        for_key = for_key + (until * wrote + beta * since * for_k).sum(2, keepdim=True)
        through = (k * for_k).sum(-1, keepdim=True)
        for_beta = (v * for_v).sum(-1, keepdim=True) + since * through
        for_beta = for_beta + (for_system * self.alike * between).sum(-1, keepdim=True)
        # Of the decay, which enters everything as an exponent: each gradient times the value it belongs to.
        pairs = (for_scores * self.scores + for_system * self.system).tril(-1)
        at_start = since * ((q * read).sum(-1, keepdim=True) + beta * through)
        at_end = until * (k * wrote).sum(-1, keepdim=True)
        for_decay = (at_start - at_end)[..., 0] + pairs.sum(-1) - pairs.sum(-2)
        last = at_end.sum((-2, -1)) + since[..., -1, 0] * (before * after).sum((-2, -1))
        for_decay[..., -1] += last
        for_decay = for_decay.flip(-1).cumsum(-1).flip(-1)
        return for_q, for_key, beta * for_v, for_decay, for_beta[..., 0], back[..., 0, :, :]


def _in_order(step: Tensor, additions: Tensor, first: Tensor | None) -> Tensor:
    """Compute x₁ = step₀ · x₀ + addition₀, and so on: […, N, K, K] and […, N, K, V] to […, N + 1, K, V]."""
    heads, (chunks, *shape) = additions.shape[:-3], additions.shape[-3:]
    step, additions = (x.expand(*heads, *x.shape[-3:]).flatten(0, -4) for x in (step, additions))
    states = additions.new_zeros(len(additions), chunks + 1, *shape)
    if first is not None:
        states[:, 0] = first.flatten(0, -3)
    for number in range(chunks):
        torch.baddbmm(additions[:, number], step[:, number], states[:, number], out=states[:, number + 1])
    return states.unflatten(0, heads)


def _chunks(x: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    """Split [B, S, key heads, R, …] into [B, key heads, R, chunks, size, …], padded with zeros, which have
    no effect."""
    count = -(-x.shape[1] // size)
    x = pad(x.to(dtype), (0, 0) * (x.ndim - 2) + (0, count * size - x.shape[1]))
    return x.unflatten(1, (count, size)).movedim((1, 2), (3, 4)).contiguous()


def _tokens(x: Tensor, length: int) -> Tensor:
    """Join [B, key heads, R, chunks, size, …] to [B, S, key heads, R, …]."""
    return x.movedim((3, 4), (1, 2)).flatten(1, 2)[:, :length].contiguous()


def _normed(x: Tensor, scale: float) -> Tensor:
    return x * (scale * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON))


def _normed_backward(grad: Tensor, x: Tensor, scale: float) -> Tensor:
    wide = x.to(grad.dtype)
    inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)
    unit = wide * inverse
    return (scale * inverse * (grad - unit * (unit * grad).sum(-1, keepdim=True))).to(x.dtype)
