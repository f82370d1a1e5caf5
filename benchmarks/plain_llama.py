"""Llama 3 as one would write it for a plain PyTorch loop: the peer that titan is measured against.

No framework, no sharding, no loss inside the model. The sizes are those of titan's flavors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "debugmodel": dict(dim=256, layers=6, heads=16, kv_heads=16, hidden=768, vocab=2048),
    "1B": dict(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, vocab=128256, tied=True),
    "3B": dict(dim=3072, layers=28, heads=24, kv_heads=8, hidden=8192, vocab=128256, tied=True),
    "8B": dict(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocab=128256),
}


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, s, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.o(a.transpose(1, 2).reshape(b, s, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Llama(nn.Module):
    """Logits [B, S, vocab] for tokens [B, S]."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        vocab: int,
        seq_len: int,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        head_dim = dim // heads
        frequencies = 500000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.arange(seq_len)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))
