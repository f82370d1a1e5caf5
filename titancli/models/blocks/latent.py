"""Multi-head latent attention: keys and values of all heads are projected from one narrow vector per token.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from titancli.models.blocks.attention import attend
from titancli.models.blocks.attention_window import WHOLE
from titancli.models.blocks.norm import norm_of
from titancli.models.blocks.rope import rotate

if TYPE_CHECKING:
    from titancli.models.blocks.cache import LayerStep
    from titancli.protocols.shape import Latent


class LatentAttention(nn.Module):
    """A head's queries and keys have a part without positions and a rotated part; all heads share the keys'
    rotated part.

    A cache holds the keys and values of every head, as for other attention, not the latent: that takes more
    memory, but a token then need not project the latents of its whole row again.
    """

    keeps_cache = True
    reach = WHOLE
    styles: ClassVar = {
        **dict.fromkeys(("wq_a", "wkv_a"), "replicate"),
        **dict.fromkeys(("wq", "wq_b", "wkv_b"), "column"),
        "wo": "row",
    }
    fills = True
    """Whether values are padded to the width of keys; set by `titancli.models.blocks.kernels`."""

    def __init__(self, spec: Latent) -> None:
        super().__init__()
        dim, heads = spec.dim, spec.heads
        self.widths = (spec.nope_dim, spec.rope.dim)
        self.head_dim, self.value_dim, self.kv_rank = spec.head_dim, spec.value_dim, spec.kv_rank
        self.scale, self.angles = spec.scale, spec.angles
        self.from_latent = spec.query_rank is not None
        if spec.query_rank is None:
            self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        else:
            self.wq_a = nn.Linear(dim, spec.query_rank, bias=False)
            self.q_norm = norm_of(spec.norm, spec.query_rank)
            self.wq_b = nn.Linear(spec.query_rank, heads * self.head_dim, bias=False)
        self.wkv_a = nn.Linear(dim, spec.kv_rank + spec.rope.dim, bias=False)
        self.kv_norm = norm_of(spec.norm, spec.kv_rank)
        self.wkv_b = nn.Linear(spec.kv_rank, heads * (spec.nope_dim + self.value_dim), bias=False)
        self.wo = nn.Linear(heads * self.value_dim, dim, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerStep | None = None
    ) -> Tensor:
        """Map [B, S, dim] to [B, S, dim]; cos and sin are [B or 1, S, 1, rope_dim / 2].

        With a cache, B is 1, and tokens attend to all that their rows have in it.
        """
        rows, length, _ = x.shape
        q = self._queries(x, cos, sin)
        k, v = self._keys_and_values(x, cos, sin)
        if cache is None:
            out = self.core_attention(q, k, v, mask, causal=True)
        else:
            out = cache.attend(q, k, v, self.reach, self.core_attention)
        return self.wo(out.reshape(rows, length, -1))

    def core_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = True
    ) -> Tensor:
        """Attend with q [B, S, heads, head_dim], k [B, T, heads, head_dim] and v [B, T, heads, value_dim];
        return [B, S, heads, value_dim]. See `titancli.models.blocks.attention.Attention.core_attention`."""
        return attend(q, k, v, mask, causal=causal, scale=self.scale, fill=self.fills)

    def _queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.wq_b(self.q_norm(self.wq_a(x))) if self.from_latent else self.wq(x)
        # Head counts are inferred, so that the same code works on a tensor-parallel shard.
        nope, rope = q.view(*x.shape[:2], -1, self.head_dim).split(self.widths, -1)
        return torch.cat((nope, rotate(rope, cos, sin)), -1)

    def _keys_and_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        nope_dim, rope_dim = self.widths
        latent, rope = self.wkv_a(x).split((self.kv_rank, rope_dim), -1)
        made = self.wkv_b(self.kv_norm(latent)).view(*x.shape[:2], -1, nope_dim + self.value_dim)
        nope, v = made.split((nope_dim, self.value_dim), -1)
        rope = rotate(rope[:, :, None], cos, sin).expand(-1, -1, nope.shape[2], -1)
        return torch.cat((nope, rope), -1), v
