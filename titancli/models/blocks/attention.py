"""Self-attention: one door to torch's kernels, and the module of grouped queries that most families have.

`attend` is the door: whatever a family's layers see (all before them, a sliding window, chunks, their
document, a sink), it comes here and leaves as calls of what `kernel_of` says, which has fast kernels on every
device. Nothing makes a matrix of S x S but masks of documents, and these are blocks on a GPU
(`titancli.models.blocks.flex`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from titancli.distributed.collectives import Group, gather
from titancli.distributed.device import device_type
from titancli.distributed.local import local
from titancli.models.blocks.flash import flash_attention, runs_flash
from titancli.models.blocks.masks import document_mask
from titancli.models.blocks.norm import norm_of
from titancli.models.blocks.reach import WHOLE, Reach
from titancli.models.blocks.rope import rotate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from titancli.models.blocks.cache import LayerCache
    from titancli.protocols.shape import Attention as Spec

__all__ = ["Attention", "attend", "document_mask"]


class Asked(NamedTuple):
    """What a kernel of attention is chosen by."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    mask: Literal["none", "dense", "blocks"] = "none"
    causal: bool = True
    """Without a mask, whether a token sees those before it and itself alone."""
    square: bool = True
    """Whether there are as many queries as keys; else the queries are the last."""
    window: bool = False
    """Whether it limits what a token sees of this row."""
    chunk: bool = False
    sinks: bool = False
    cap: bool = False


Kernel = Literal["sdpa", "flash", "flex", "chunks", "windows", "masked", "written out"]


def kernel_of(asked: Asked) -> Kernel:
    """Return what computes an attention.

    - "sdpa": `scaled_dot_product_attention`, which chooses among kernels itself.
    - "flash": `titancli.models.blocks.flash`, which knows of sinks and, on a GPU, of windows and of queries
      that are the last of the keys.
    - "flex": `titancli.models.blocks.flex`, in blocks.
    - "chunks", "windows": each chunk, or as many queries as a window is wide, as a row of its own; of these
      it is asked again.
    - "masked": a mask is made, and it is asked again.
    - "written out": by matrices of queries and keys, which are few where a GPU samples. On a CPU nothing else
      knows of caps.
    """
    if asked.mask == "blocks":
        return "flex"
    if asked.cap:
        if asked.mask == "dense" or not asked.causal:
            return "written out"
        return "flex" if asked.device == "cuda" and asked.square else "masked"
    flash = runs_flash(asked.device, asked.dtype, asked.head_dim, asked.value_dim)
    if asked.mask == "dense" or not asked.causal:
        if not asked.sinks:
            return "sdpa"
        return "written out" if asked.device == "cuda" else "flash"
    if asked.chunk:
        return "chunks" if asked.square and not asked.window else "masked"
    if flash and (asked.window or asked.sinks or not asked.square):
        return "flash"
    if not asked.square:
        return "masked"
    if asked.sinks and asked.device == "cuda":
        return "flex"
    if asked.window:
        return "windows"
    return "flash" if asked.sinks else "sdpa"


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
    sinks: Tensor | None = None,
    cap: float | None = None,
    fill: bool = True,
) -> Tensor:
    """softmax(scale · q·kᵀ) · v of what each query sees.

    Args:
        q: [B, S, heads, head_dim].
        k: [B, T, kv heads, head_dim].
        v: [B, T, kv heads, value_dim].
        mask: [B or 1, 1, S, T], bool or in blocks, the reach in it already; None: `causal` says.
        causal: without a mask, whether a token sees those before it and itself, within `reach`; of T keys the
            queries are the last S.
        reach: how far back a token sees.
        scale: None: 1 / √head_dim.
        grouped: whether there are fewer heads of keys than of queries.
        sinks: [heads], a logit of each head that takes its share of the softmax and gives nothing.
        cap: scaled products x become cap · tanh(x / cap); None: they stay as they are.
        fill: whether values that are narrower than keys are filled up, where kernels want heads of one width.

    Returns:
        [B, S, heads, value_dim].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    core = _Core(scale, grouped, sinks, cap, fill)
    return core(q, k, v, mask, causal, reach)


class _Core:
    """Attention of some queries, keys and values; shapes as of `attend`."""

    def __init__(
        self, scale: float, grouped: bool, sinks: Tensor | None, cap: float | None, fill: bool
    ) -> None:
        self.scale, self.grouped, self.sinks, self.cap, self.fill = scale, grouped, sinks, cap, fill

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | BlockMask | None,
        causal: bool = True,
        reach: Reach = WHOLE,
    ) -> Tensor:
        # Only what differs for it is asked of a shape: compiled for changing ones, a comparison is symbolic.
        limited = mask is None and causal and reach.limits(k.shape[1])
        given = mask if isinstance(mask, Tensor) else None
        kernel = kernel_of(
            Asked(
                device=device_type(q),
                dtype=q.dtype,
                head_dim=q.shape[-1],
                value_dim=v.shape[-1],
                mask="none" if mask is None else "dense" if isinstance(mask, Tensor) else "blocks",
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
        # On meta nothing runs.
        if width < q.shape[-1] and device_type(q) != "meta" and (self.fill or kernel == "flash"):
            v = pad(v, (0, q.shape[-1] - width))
        if kernel == "flash":
            window = reach.window if limited else None
            out = flash_attention(
                q, k, v, scale=self.scale, causal=causal, window=window, mask=given, sinks=self.sinks
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

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, reach: Reach) -> Tensor:
        if q.is_meta:  # nothing runs, and as much is kept
            return flash_attention(q, k, v, scale=self.scale, causal=True, sinks=self.sinks)
        # These bring torch's compiler.
        from titancli.models.blocks.flex import attend_in_blocks, document_block_mask

        if mask is None:  # one document
            mask = document_block_mask(q.new_zeros((1, q.shape[1]), dtype=torch.int32), reach)
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


def _in_chunks(core: _Core, q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """Each chunk is a row of its own; the last may be short."""
    rows, length = q.shape[:2]
    whole = length // chunk * chunk
    pieces = [x[:, :whole].reshape(-1, chunk, *x.shape[2:]) for x in (q, k, v)]
    out = core(pieces[0], pieces[1], pieces[2], None).reshape(rows, whole, q.shape[2], -1)
    if whole == length:
        return out
    return torch.cat((out, core(q[:, whole:], k[:, whole:], v[:, whole:], None)), 1)


def _in_window(core: _Core, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Blocks of as many queries as the window is wide see their own block's keys and those of the one before;
    the first block's are plainly causal."""
    rows, length = q.shape[:2]
    first = core(q[:, :window], k[:, :window], v[:, :window], None)
    blocks = -(-length // window)
    if blocks * window != length:  # `pad` copies also where there is nothing to add
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
    """A norm over the numbers of all heads, also where ranks have some heads each."""

    styles: ClassVar = {"weight": "column"}
    tensor_group: Group | None = None
    """The ranks that have the other heads."""

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Called by the `decoder` plan; the style is "column"."""
        self.tensor_group = group

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, heads, head_dim] -> the same."""
        flat, weight = x.flatten(-2), local(self.weight)
        if self.tensor_group is None:
            return rms_norm(flat, self.normalized_shape, weight, self.eps).view_as(x)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        # Each rank goes on with other heads, so that the gradient of the sum is a sum as well.
        squares = gather(wide.square().sum(-1, keepdim=True), 2, self.tensor_group).sum(-1, keepdim=True)
        count = flat.shape[-1] * self.tensor_group.size
        normed = wide * torch.rsqrt(squares / count + (self.eps or 0.0))
        return (normed * weight.to(wide.dtype)).to(x.dtype).view_as(x)


class Attention(nn.Module):
    """See `titancli.protocols.shape.Attention`.

    `mask` None means causal over the whole row, as far as the reach goes; a token that comes alone sees all
    that the cache holds.
    """

    takes_local_parameters = True
    styles: ClassVar = {**dict.fromkeys(("sinks", "wq", "wk", "wv"), "column"), "wo": "row"}

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        dim, width, bias = spec.dim, spec.head_dim, spec.bias
        self.head_dim, self.value_dim, self.scale, self.cap = width, spec.value_dim, spec.scale, spec.cap
        self.reach, self.angles = Reach(spec.window, spec.chunk), spec.angles
        # Known before any shape is: compiled for changing shapes, a comparison of these would be symbolic.
        self.grouped = spec.heads != spec.kv_heads
        self.wq = nn.Linear(dim, spec.heads * width * (1 + spec.gated), bias="q" in bias)
        self.wk = nn.Linear(dim, spec.kv_heads * width, bias="k" in bias)
        self.wv = nn.Linear(dim, spec.kv_heads * width, bias="v" in bias)
        self.wo = nn.Linear(spec.heads * width, dim, bias="o" in bias)
        self.q_norm = self._norm(spec.heads)
        self.k_norm = self._norm(spec.kv_heads)
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None

    def _norm(self, heads: int) -> nn.Module | None:
        """The norm of so many heads of queries or keys."""
        spec = self.spec
        if spec.qk_norm == "whole":
            return HeadsNorm(heads * spec.head_dim, eps=spec.norm.eps)
        return norm_of(spec.norm, spec.head_dim) if spec.qk_norm else None

    @property
    def is_plain_softmax(self) -> bool:
        """Whether `core_attention` is causal softmax(q·kᵀ/√head_dim)·v over whole rows and no more, so that
        keys can come in blocks."""
        return self.reach == WHOLE and self.scale is None and self.sinks is None and self.cap is None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache | None = None
    ) -> Tensor:
        """[B, S, dim] -> [B, S, dim]; cos and sin [B or 1, S, 1, head_dim / 2].

        With a cache, S tokens attend to the T that it then holds, and the mask is [B or 1, 1, S, T].
        """
        rows, length, _ = x.shape
        gated = self.spec.gated
        # Head counts are read off the result, so that the same code works on a tensor-parallel shard.
        q = self.wq(x).view(rows, length, -1, self.head_dim * (1 + gated))
        q, gate = q.chunk(2, -1) if gated else (q, None)
        k = self.wk(x).view(rows, length, -1, self.head_dim)
        v = self.wv(x).view(rows, length, -1, self.head_dim)
        q, k = self.place(q, k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        more = {} if self.sinks is None else {"sinks": local(self.sinks)}
        # A token that comes alone may see all that the cache holds; else no shape decides what is masked.
        out = self.core_attention(q, k, v, mask, causal=cache is None or length > 1, **more)
        out = out if gate is None else out * gate.sigmoid()
        return self.wo(out.reshape(rows, length, -1))

    def place(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys that know where they are, [B, S, heads, head_dim] each."""
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
        """q [B, S, heads, head_dim], k and v [B, T, kv heads, head_dim] -> [B, S, heads, head_dim].

        A plan may put a method in its place that brings rows or heads together and calls this one with them
        (`titancli.parallel.context`); so all that it needs comes in, save for what heads do not differ in.

        Args:
            mask: [B or 1, 1, S, T] bool, the module's reach in it; None: `causal` says.
            causal: without a mask, whether a token sees those before it and itself alone; the queries are
                the last S of T.
            sinks: [heads], given where the module has them, of the heads that are here.
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
