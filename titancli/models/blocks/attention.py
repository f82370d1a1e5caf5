"""Causal self-attention with grouped queries and rotary positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from titancli.models.blocks.rope import rotate

if TYPE_CHECKING:
    from titancli.models.blocks.cache import LayerCache


def document_mask(document_ids: Tensor) -> Tensor:
    """[B, 1, S, S] bool: a token sees those before it, and itself, within its document.

    Args:
        document_ids: [B, S] integers.
    """
    length = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril_().view(-1, 1, length, length)


class Attention(nn.Module):
    """Grouped-query attention.

    Source: arXiv 2305.13245. `mask` None means causal over the whole row, the fast path of SDPA; a token
    that comes alone sees all that the cache holds.
    """

    is_plain_softmax = True
    """Whether `core_attention` is softmax(q·kᵀ/√head_dim)·v and no more, so that keys can come in blocks."""

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, *, qk_norm_eps: float | None = None
    ) -> None:
        """With `qk_norm_eps` every head's query and key are normed (RMS), with weights that heads share."""
        super().__init__()
        self.head_dim = head_dim
        # Known before any shape is: compiled for changing shapes, a comparison of these would be symbolic.
        self.grouped = n_heads != n_kv_heads
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        normed = qk_norm_eps is not None
        self.q_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if normed else None
        self.k_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if normed else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache | None = None
    ) -> Tensor:
        """[B, S, dim] -> [B, S, dim]; cos and sin [B or 1, S, 1, head_dim / 2].

        With a cache, S tokens attend to the T that it then holds, and the mask is [B or 1, 1, S, T].
        """
        rows, length, _ = x.shape
        # Head counts are read off the result, so that the same code works on a tensor-parallel shard.
        q = self.wq(x).view(rows, length, -1, self.head_dim)
        k = self.wk(x).view(rows, length, -1, self.head_dim)
        v = self.wv(x).view(rows, length, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        # A token that comes alone may see all that the cache holds; else no shape decides what is masked.
        out = self.core_attention(q, k, v, mask, causal=cache is None or length > 1)
        return self.wo(out.reshape(rows, length, -1))

    def core_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = True
    ) -> Tensor:
        """q [B, S, heads, head_dim], k and v [B, T, kv heads, head_dim] -> [B, S, heads, head_dim].

        A plan may put a method in its place that brings rows or heads together and calls this one with them
        (`titancli.parallel.context`); so all that it needs comes in, save for what heads do not differ in.

        Args:
            mask: [B or 1, 1, S, T], or an `attn_bias` of torch's; None: `causal` says.
            causal: without a mask, whether a token sees those before it and itself alone; S is T then.
        """
        out = scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and causal,
            enable_gqa=self.grouped,
        )
        return out.transpose(1, 2)
