"""Self-attention: one door to torch's kernels, and the module of grouped queries that most families have.

`attend` is the door: whatever a family's layers see (all before them, a sliding window, chunks, their
document, a sink), it comes here and leaves as calls of `scaled_dot_product_attention`, which has fast kernels
on every device. Nothing makes a matrix of S x S but masks of documents, and these are blocks on a GPU
(`titancli.models.blocks.flex`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from titancli.distributed.local import local
from titancli.models.blocks.masks import document_mask
from titancli.models.blocks.reach import WHOLE, Reach
from titancli.models.blocks.rope import rotate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from titancli.models.blocks.cache import LayerCache

__all__ = ["Attention", "attend", "document_mask", "with_sinks"]

EXTRA = 8
"""Dimensions that a head gets for its sink: kernels want multiples of eight."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | BlockMask | None,
    *,
    causal: bool = True,
    reach: Reach = WHOLE,
    scale: float | None = None,
    grouped: bool = False,
    sinks: bool = False,
) -> Tensor:
    """softmax(scale · q·kᵀ) · v of what each query sees.

    Args:
        q: [B, S, heads, head_dim].
        k: [B, T, kv heads, head_dim].
        v: [B, T, kv heads, value_dim].
        mask: [B or 1, 1, S, T], bool or in blocks, the reach in it already; None: `causal` says.
        causal: without a mask, whether a token sees those before it and itself, within `reach`; S is T then.
        reach: how far back a token sees.
        scale: None: 1 / √head_dim.
        grouped: whether there are fewer heads of keys than of queries.
        sinks: whether q and k come from `with_sinks`.

    Returns:
        [B, S, heads, value_dim].
    """
    if scale is None:
        scale = (q.shape[-1] - EXTRA if sinks else q.shape[-1]) ** -0.5
    if mask is not None and not isinstance(mask, Tensor):
        return _in_blocks(q, k, v, mask, scale, grouped, sinks)
    core = _Core(scale, grouped, sinks)
    if mask is not None or not causal or not reach.limits(q.shape[1]):
        return core(q, k, v, mask, causal)
    if reach.window is None and reach.chunk is not None:
        return _in_chunks(core, q, k, v, reach.chunk)
    if reach.chunk is None and reach.window is not None:
        return _in_window(core, q, k, v, reach.window)
    row = range(q.shape[1])
    return core(q, k, v, reach.mask(row, row, q.device)[None, None], causal)


def with_sinks(q: Tensor, k: Tensor, sinks: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Queries and keys for attention that has a sink: a logit of each head, which takes its share of the
    softmax and gives nothing.

    It becomes one more key, whose product with a query is that logit: heads get eight more dimensions, in the
    first of which the query has the logit (over the scale) and that key alone is not zero. So kernels that
    know of no sinks do, and what differs between heads travels with their queries.

    Args:
        q: [B, S, heads, head_dim].
        k: [B, T, kv heads, head_dim].
        sinks: [heads].
        scale: as in `attend`.

    Returns:
        [B, S, heads, head_dim + 8] and [B, T, kv heads, head_dim + 8].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = (sinks / scale).to(q.dtype).expand(q.shape[:-1])[..., None]
    return torch.cat((q, pad(logits, (0, EXTRA - 1))), -1), pad(k, (0, EXTRA))


class _Core:
    """One call of torch's kernel, after its needs."""

    def __init__(self, scale: float, grouped: bool, sinks: bool) -> None:
        self.scale, self.grouped, self.sinks = scale, grouped, sinks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Shapes as of `attend`."""
        width, causal = v.shape[-1], mask is None and causal
        if self.sinks:
            k, v = _before(k, _unit(k)), pad(v, (0, 0, 0, 0, 1, 0))
            if mask is not None:
                mask = pad(mask, (1, 0), value=True)
            elif causal:  # a query before the others, so that the rows still make a square
                q = pad(q, (0, 0, 0, 0, 1, 0))
        if width < q.shape[-1] and q.device.type != "meta":  # where kernels want heads of one width
            v = pad(v, (0, q.shape[-1] - width))
        out = scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=self.grouped,
        ).transpose(1, 2)
        out = out[:, 1:] if self.sinks and causal else out
        return out[..., :width] if out.shape[-1] != width else out


def _unit(k: Tensor) -> Tensor:
    """The key of the sink, [1, 1, 1, head_dim + 8]."""
    unit = k.new_zeros(k.shape[-1])
    unit[-EXTRA].fill_(1)
    return unit[None, None, None]


def _before(x: Tensor, first: Tensor) -> Tensor:
    return torch.cat((first.expand(x.shape[0], 1, x.shape[2], -1), x), 1)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, grouped: bool, sinks: bool
) -> Tensor:
    """A sink is no key there: what it takes follows from the sums of the softmax."""
    from titancli.models.blocks.flex import attend_in_blocks  # brings torch's compiler

    sink = None
    if sinks:
        width = q.shape[-1] - EXTRA
        q, k, sink = q[..., :width], k[..., :width], q[..., width] * scale
    return attend_in_blocks(q, k, v, mask, scale=scale, grouped=grouped, sink=sink)


def _in_chunks(core: _Core, q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """Each chunk is a row of its own; the last may be short."""
    rows, length = q.shape[:2]
    whole = length // chunk * chunk
    pieces = [x[:, :whole].reshape(-1, chunk, *x.shape[2:]) for x in (q, k, v)]
    out = core(pieces[0], pieces[1], pieces[2], None, True).reshape(rows, whole, q.shape[2], -1)
    if whole == length:
        return out
    return torch.cat((out, core(q[:, whole:], k[:, whole:], v[:, whole:], None, True)), 1)


def _in_window(core: _Core, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Blocks of as many queries as the window is wide see their own block's keys and those of the one before;
    the first block's are plainly causal."""
    rows, length = q.shape[:2]
    first = core(q[:, :window], k[:, :window], v[:, :window], None, True)
    blocks = -(-length // window)
    q, k, v = (pad(x, (0, 0, 0, 0, 0, blocks * window - length)) for x in (q, k, v))
    queries = q[:, window:].reshape(-1, window, *q.shape[2:])
    k, v = (
        torch.cat((x[:, :-1], x[:, 1:]), 2).flatten(0, 1)
        for x in (x.unflatten(1, (blocks, window)) for x in (k, v))
    )
    mask = Reach(window).mask(range(window, 2 * window), range(2 * window), q.device)[None, None]
    rest = core(queries, k, v, mask, True).reshape(rows, (blocks - 1) * window, q.shape[2], -1)
    return torch.cat((first, rest[:, : length - window]), 1)


class Attention(nn.Module):
    """Grouped-query attention.

    Source: arXiv 2305.13245. `mask` None means causal over the whole row, as far as the reach goes; a token
    that comes alone sees all that the cache holds.
    """

    takes_local_parameters = True
    angles: Any = None
    """Which of the decoder's `angles` it is given as cos and sin."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        qk_norm_eps: float | None = None,
        norm: type[nn.RMSNorm] = nn.RMSNorm,
        bias: Collection[str] = "",
        reach: Reach = WHOLE,
        sinks: bool = False,
        scale: float | None = None,
        rotary: bool = True,
        scaled: bool = False,
        norm_after_eps: float | None = None,
        gated: bool = False,
    ) -> None:
        """
        Args:
            qk_norm_eps: if given, every head's query and key are normed (RMS), with weights that heads share.
            norm: the class of these norms.
            bias: which of the products q, k, v and o have one.
            reach: how far back a token sees.
            sinks: whether each head has a logit that takes its share of the softmax and gives nothing.
            scale: what products of queries and keys are multiplied by; None: 1 / √head_dim.
            rotary: whether queries and keys are rotated.
            scaled: whether queries are multiplied by what comes as cos (where nothing is rotated).
            norm_after_eps: if given, rotated queries and keys are normed, without weights.
            gated: whether `wq` makes as many numbers again, whose sigmoids multiply what heads give.
        """
        super().__init__()
        self.gated = gated
        self.head_dim = self.value_dim = head_dim
        self.reach, self.scale = reach, scale
        self.rotary, self.scaled, self.norm_after_eps = rotary, scaled, norm_after_eps
        # Known before any shape is: compiled for changing shapes, a comparison of these would be symbolic.
        self.grouped = n_heads != n_kv_heads
        self.wq = nn.Linear(dim, n_heads * head_dim * (1 + gated), bias="q" in bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias="k" in bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias="v" in bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias="o" in bias)
        normed = qk_norm_eps is not None
        self.q_norm = norm(head_dim, eps=qk_norm_eps) if normed else None
        self.k_norm = norm(head_dim, eps=qk_norm_eps) if normed else None
        self.sinks = nn.Parameter(torch.empty(n_heads)) if sinks else None

    @property
    def is_plain_softmax(self) -> bool:
        """Whether `core_attention` is causal softmax(q·kᵀ/√head_dim)·v over whole rows and no more, so that
        keys can come in blocks."""
        return self.reach == WHOLE and self.scale is None and self.sinks is None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache | None = None
    ) -> Tensor:
        """[B, S, dim] -> [B, S, dim]; cos and sin [B or 1, S, 1, head_dim / 2].

        With a cache, S tokens attend to the T that it then holds, and the mask is [B or 1, 1, S, T].
        """
        rows, length, _ = x.shape
        # Head counts are read off the result, so that the same code works on a tensor-parallel shard.
        q = self.wq(x).view(rows, length, -1, self.head_dim * (1 + self.gated))
        q, gate = q.chunk(2, -1) if self.gated else (q, None)
        k = self.wk(x).view(rows, length, -1, self.head_dim)
        v = self.wv(x).view(rows, length, -1, self.head_dim)
        q, k = self.place(q, k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        if self.sinks is not None:
            q, k = with_sinks(q, k, local(self.sinks), self.scale)
        # A token that comes alone may see all that the cache holds; else no shape decides what is masked.
        out = self.core_attention(q, k, v, mask, causal=cache is None or length > 1)
        out = out if gate is None else out * gate.sigmoid()
        return self.wo(out.reshape(rows, length, -1))

    def place(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys that know where they are, [B, S, heads, head_dim] each."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if not self.rotary:
            return ((q * cos).to(q.dtype), k) if self.scaled else (q, k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.norm_after_eps is None:
            return q, k
        return rms_norm(q, q.shape[-1:], eps=self.norm_after_eps), rms_norm(
            k, k.shape[-1:], eps=self.norm_after_eps
        )

    def core_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = True
    ) -> Tensor:
        """q [B, S, heads, head_dim], k and v [B, T, kv heads, head_dim] -> [B, S, heads, head_dim].

        A plan may put a method in its place that brings rows or heads together and calls this one with them
        (`titancli.parallel.context`); so all that it needs comes in, save for what heads do not differ in.

        Args:
            mask: [B or 1, 1, S, T] bool, the module's reach in it; None: `causal` says.
            causal: without a mask, whether a token sees those before it and itself alone; S is T then.
        """
        return attend(
            q,
            k,
            v,
            mask,
            causal=causal,
            reach=self.reach,
            scale=self.scale,
            grouped=self.grouped,
            sinks=self.sinks is not None,
        )
