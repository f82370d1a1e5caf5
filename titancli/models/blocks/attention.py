"""Self-attention: a single entry to torch's kernels, and the grouped-query module that most families use.

`attend` is the entry: whatever a family's layers see (all tokens before, a sliding window, chunks, their
document, a sink), it is computed here by the kernels that `kernel_of` chooses, which are fast on every
device. Only document masks materialize S x S, and on a GPU none is made
(`titancli.models.blocks.masks`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from titancli.distributed.collectives import Group, gather
from titancli.distributed.device import device_type
from titancli.distributed.local import local
from titancli.models.blocks.attention_window import WHOLE, Reach
from titancli.models.blocks.flash import flash_attention, runs_flash
from titancli.models.blocks.masks import Documents, document_mask
from titancli.models.blocks.norm import norm_of
from titancli.models.blocks.rope import rotate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from titancli.models.blocks.cache import LayerStep
    from titancli.protocols.shape import Attention as Spec

    AnyMask = Tensor | Documents | BlockMask

__all__ = ["Attention", "attend", "document_mask"]


class AttentionCall(NamedTuple):
    """Properties of an attention call that its kernel is chosen by."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    mask: Literal["none", "dense", "documents", "blocks"] = "none"
    causal: bool = True
    """Without a mask, whether a token sees only itself and the tokens before it."""
    square: bool = True
    """Whether there are as many queries as keys; otherwise the queries are the last tokens."""
    window: bool = False
    """Whether a window limits what a token sees in this row."""
    chunk: bool = False
    sinks: bool = False
    cap: bool = False


Kernel = Literal["sdpa", "flash", "varlen", "flex", "chunks", "windows", "masked", "written out"]


def kernel_of(call: AttentionCall) -> Kernel:
    """Return the kernel that computes an attention call.

    - "sdpa": `scaled_dot_product_attention`, which chooses among kernels itself.
    - "flash": `titancli.models.blocks.flash`, which supports sinks and, on a GPU, windows and queries that
      are the last of the keys.
    - "varlen": the same for documents: rows of any length, one after another.
    - "flex": `titancli.models.blocks.flex`, with block masks.
    - "chunks", "windows": each chunk, or as many queries as a window is wide, becomes a row of its own; a
      kernel is chosen again for these.
    - "masked": a mask is made, and a kernel is chosen again.
    - "written out": by materialized scores, which are few where a GPU samples. On a CPU no other kernel
      supports caps.
    """
    if call.mask == "blocks":
        return "flex"
    flash = runs_flash(call.device, call.dtype, call.head_dim, call.value_dim)
    if call.mask == "documents":
        return "varlen" if flash and not call.cap else "flex"
    if call.cap:
        if call.mask == "dense" or not call.causal:
            return "written out"
        return "flex" if call.device == "cuda" and call.square else "masked"
    if call.mask == "dense" or not call.causal:
        if not call.sinks:
            return "sdpa"
        return "written out" if call.device == "cuda" else "flash"
    if call.chunk:
        return "chunks" if call.square and not call.window else "masked"
    if flash and (call.window or call.sinks or not call.square):
        return "flash"
    if not call.square:
        return "masked"
    if call.sinks and call.device == "cuda":
        return "flex"
    if call.window:
        return "windows"
    return "flash" if call.sinks else "sdpa"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    *,
    causal: bool = True,
    reach: Reach = WHOLE,
    scale: float | None = None,
    grouped: bool = False,
    sinks: Tensor | None = None,
    cap: float | None = None,
    fill: bool = True,
) -> Tensor:
    """Return softmax(scale · q·kᵀ) · v over the keys that each query sees.

    Args:
        q: [B, S, heads, head_dim].
        k: [B, T, kv heads, head_dim].
        v: [B, T, kv heads, value_dim].
        mask: [B or 1, 1, S, T], bool or a block mask, including the reach; or the documents of whole rows;
            None: see `causal`.
        causal: without a mask, whether a token sees only itself and tokens before it, within `reach`; the
            queries are the last S of T tokens.
        reach: how far back a token sees.
        scale: None: 1 / √head_dim.
        grouped: whether there are fewer key heads than query heads.
        sinks: [heads], a logit per head that takes part in the softmax but contributes no value.
        cap: scaled products x become cap · tanh(x / cap); None: no cap.
        fill: whether to pad values that are narrower than keys, where kernels need heads of one width.

    Returns:
        [B, S, heads, value_dim].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    core = _Core(scale, grouped, sinks, cap, fill)
    return core(q, k, v, mask, causal, reach)


class _Core:
    """Attention with fixed options; shapes as in `attend`."""

    def __init__(
        self, scale: float, grouped: bool, sinks: Tensor | None, cap: float | None, fill: bool
    ) -> None:
        self.scale, self.grouped, self.sinks, self.cap, self.fill = scale, grouped, sinks, cap, fill

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AnyMask | None,
        causal: bool = True,
        reach: Reach = WHOLE,
    ) -> Tensor:
        # Compare shapes only where it matters: when compiled for dynamic shapes, comparisons are symbolic.
        limited = mask is None and causal and reach.limits(k.shape[1])
        given = mask if isinstance(mask, Tensor) else None
        documents = mask if isinstance(mask, Documents) else None
        kernel = kernel_of(
            AttentionCall(
                device=device_type(q),
                dtype=q.dtype,
                head_dim=q.shape[-1],
                value_dim=v.shape[-1],
                mask=_kind(mask),
                causal=causal,
                square=mask is not None or not causal or q.shape[1] == k.shape[1],
                window=limited and reach.window is not None,
                chunk=limited and reach.chunk is not None,
                sinks=self.sinks is not None,
                cap=self.cap is not None,
            )
        )
        if kernel == "chunks" and reach.chunk is not None:
            return _in_chunks(self, q, k, v, reach.chunk)
        if kernel == "windows" and reach.window is not None:
            return _in_window(self, q, k, v, reach.window)
        if kernel == "masked":
            first = k.shape[1] - q.shape[1]
            seen = reach.mask(range(first, k.shape[1]), range(k.shape[1]), q.device)
            return self(q, k, v, seen[None, None])
        if kernel == "flex":
            return self._flex(q, k, v, None if isinstance(mask, Tensor) else mask, reach)
        if kernel == "written out":
            return self._written_out(q, k, v, given)
        causal, width = mask is None and causal, v.shape[-1]
        # Nothing runs on meta.
        if width < q.shape[-1] and device_type(q) != "meta" and (self.fill or kernel != "sdpa"):
            v = pad(v, (0, q.shape[-1] - width))
        if kernel in ("flash", "varlen"):
            out = flash_attention(
                q,
                k,
                v,
                scale=self.scale,
                causal=causal or kernel == "varlen",
                window=reach.window if limited or kernel == "varlen" else None,
                mask=given,
                sinks=self.sinks,
                documents=documents,
            )
        else:
            out = scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=given,
                is_causal=causal,
                scale=self.scale,
                enable_gqa=self.grouped,
            ).transpose(1, 2)
        return out[..., :width] if out.shape[-1] != width else out

    def _flex(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Documents | None, reach: Reach
    ) -> Tensor:
        if q.is_meta:  # nothing runs, and the same is kept for backward
            return flash_attention(q, k, v, scale=self.scale, causal=True, sinks=self.sinks)
        # These import torch's compiler.
        from titancli.models.blocks.flex import attend_in_blocks, document_block_mask

        if mask is None:  # one document
            mask = document_block_mask(q.new_zeros((1, q.shape[1]), dtype=torch.int32), reach)
        if isinstance(mask, Documents):
            mask = document_block_mask(mask.ids, reach)
        how: dict[str, Any] = {"scale": self.scale, "grouped": self.grouped}
        return attend_in_blocks(q, k, v, mask, **how, sinks=self.sinks, cap=self.cap)

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        groups = q.shape[1] // k.shape[1]
        scores = (q.unflatten(1, (k.shape[1], groups)) @ k[:, :, None].transpose(-1, -2)).float() * self.scale
        scores = scores.flatten(1, 2)
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
        out = weights.unflatten(1, (k.shape[1], groups)) @ v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2)


def _kind(mask: AnyMask | None) -> Literal["none", "dense", "documents", "blocks"]:
    if mask is None:
        return "none"
    return "dense" if isinstance(mask, Tensor) else "documents" if isinstance(mask, Documents) else "blocks"


def _in_chunks(core: _Core, q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """Attend within each chunk as a row of its own; the last may be short."""
    rows, length = q.shape[:2]
    whole = length // chunk * chunk
    pieces = [x[:, :whole].reshape(-1, chunk, *x.shape[2:]) for x in (q, k, v)]
    out = core(pieces[0], pieces[1], pieces[2], None).reshape(rows, whole, q.shape[2], -1)
    if whole == length:
        return out
    return torch.cat((out, core(q[:, whole:], k[:, whole:], v[:, whole:], None)), 1)


def _in_window(core: _Core, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend in blocks of as many queries as the window is wide: each sees the keys of its own and the
    previous block; the first block is plainly causal."""
    rows, length = q.shape[:2]
    first = core(q[:, :window], k[:, :window], v[:, :window], None)
    blocks = -(-length // window)
    if blocks * window != length:  # `pad` copies even if there is nothing to add
        q, k, v = (pad(x, (0, 0, 0, 0, 0, blocks * window - length)) for x in (q, k, v))
    queries = q[:, window:].reshape(-1, window, *q.shape[2:])
    k, v = (
        torch.cat((x[:, :-1], x[:, 1:]), 2).flatten(0, 1)
        for x in (x.unflatten(1, (blocks, window)) for x in (k, v))
    )
    mask = Reach(window).mask(range(window, 2 * window), range(2 * window), q.device)[None, None]
    rest = core(queries, k, v, mask).reshape(rows, (blocks - 1) * window, q.shape[2], -1)
    return torch.cat((first, rest[:, : length - window]), 1)


class HeadsNorm(nn.RMSNorm):
    """An RMS norm over all heads together, also if the heads are split over ranks."""

    styles: ClassVar = {"weight": "column"}
    tensor_group: Group | None = None
    """The ranks that hold the other heads."""

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Shard the module; called by the `decoder` plan with the style "column"."""
        self.tensor_group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [B, S, heads, head_dim]."""
        flat, weight = x.flatten(-2), local(self.weight)
        if self.tensor_group is None:
            return rms_norm(flat, self.normalized_shape, weight, self.eps).view_as(x)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        # Ranks continue with different heads, so the gradient of the sum is a sum as well.
        squares = gather(wide.square().sum(-1, keepdim=True), 2, self.tensor_group).sum(-1, keepdim=True)
        count = flat.shape[-1] * self.tensor_group.size
        normed = wide * torch.rsqrt(squares / count + (self.eps or 0.0))
        return (normed * weight.to(wide.dtype)).to(x.dtype).view_as(x)


class Attention(nn.Module):
    """Grouped-query attention, see `titancli.protocols.shape.Attention`.

    A `mask` of None means causal over the whole row, within the reach.
    """

    keeps_cache = True
    takes_local_parameters = True
    styles: ClassVar = {**dict.fromkeys(("sinks", "wq", "wk", "wv"), "column"), "wo": "row"}

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        dim, width, bias = spec.dim, spec.head_dim, spec.bias
        self.head_dim, self.value_dim, self.scale, self.cap = width, spec.value_dim, spec.scale, spec.cap
        self.reach, self.angles = Reach(spec.window, spec.chunk), spec.angles
        # Determined from the spec: when compiled for dynamic shapes, comparing head counts would be symbolic.
        self.grouped = spec.heads != spec.kv_heads
        self.wq = nn.Linear(dim, spec.heads * width * (1 + spec.gated), bias="q" in bias)
        self.wk = nn.Linear(dim, spec.kv_heads * width, bias="k" in bias)
        self.wv = nn.Linear(dim, spec.kv_heads * width, bias="v" in bias)
        self.wo = nn.Linear(spec.heads * width, dim, bias="o" in bias)
        self.q_norm = self._norm(spec.heads)
        self.k_norm = self._norm(spec.kv_heads)
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None

    def _norm(self, heads: int) -> nn.Module | None:
        """Return the norm for queries or keys with this many heads."""
        spec = self.spec
        if spec.qk_norm == "whole":
            return HeadsNorm(heads * spec.head_dim, eps=spec.norm.eps)
        return norm_of(spec.norm, spec.head_dim) if spec.qk_norm else None

    @property
    def is_plain_softmax(self) -> bool:
        """Return whether `core_attention` is exactly causal softmax(q·kᵀ/√head_dim)·v over whole rows, so
        that keys may be processed in blocks."""
        return self.reach == WHOLE and self.scale is None and self.sinks is None and self.cap is None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerStep | None = None
    ) -> Tensor:
        """Map [B, S, dim] to [B, S, dim]; cos and sin are [B or 1, S, 1, head_dim / 2].

        With a cache, B is 1, and tokens attend to all that their rows have in it.
        """
        rows, length, _ = x.shape
        gated = self.spec.gated
        # Head counts are inferred, so that the same code works on a tensor-parallel shard.
        q = self.wq(x).view(rows, length, -1, self.head_dim * (1 + gated))
        q, gate = q.chunk(2, -1) if gated else (q, None)
        k = self.wk(x).view(rows, length, -1, self.head_dim)
        v = self.wv(x).view(rows, length, -1, self.head_dim)
        q, k = self.encode_positions(q, k, cos, sin)
        more: dict[str, Any] = {} if self.sinks is None else {"sinks": local(self.sinks)}
        if cache is None:
            out = self.core_attention(q, k, v, mask, causal=True, **more)
        else:
            out = cache.attend(q, k, v, self.reach, partial(self.core_attention, **more))
        out = out if gate is None else out * gate.sigmoid()
        return self.wo(out.reshape(rows, length, -1))

    def encode_positions(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys with their positions encoded, and normalized, [B, S, heads, head_dim]
        each."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        spec = self.spec
        if not spec.rotary:
            return ((q * cos).to(q.dtype), k) if spec.temperature is not None else (q, k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if not spec.norm_after:
            return q, k
        width, eps = q.shape[-1:], spec.norm.eps
        return rms_norm(q, width, eps=eps), rms_norm(k, width, eps=eps)

    def core_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with q [B, S, heads, head_dim] and k, v [B, T, kv heads, head_dim]; return [B, S, heads,
        head_dim].

        A plan may replace this method by one that gathers rows or heads and calls the original with them
        (`titancli.parallel.context`), so everything that differs between heads is an argument.

        Args:
            mask: [B or 1, 1, S, T] bool, including the module's reach; None: see `causal`.
            causal: without a mask, whether a token sees only itself and tokens before it; the queries are the
                last S of T.
            sinks: [heads], the sinks of these heads, if the module has any.
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
            sinks=sinks,
            cap=self.cap,
        )
