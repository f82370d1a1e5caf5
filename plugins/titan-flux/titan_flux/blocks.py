"""Building blocks of FLUX.1. Every module runs on [B, tokens, dim] of any float dtype; angles are fp32."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

EPS = 1e-6
TIME_DIM = 256
"""Width of the sinusoidal time embedding."""


class Angles(NamedTuple):
    """Cosine and sine, fp32 [B, tokens, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def rotation(places: Tensor, axes_dim: tuple[int, ...], theta: float) -> Angles:
    """Return the angles of a head's pairs: those of each axis rotate with that coordinate of a token's
    position.

    Args:
        places: [B, tokens, axes] integers.
    """
    angles = []
    for axis, width in enumerate(axes_dim):
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=places.device) / width
        angles.append(places[..., axis, None].double() * theta**-exponents)
    joined = torch.cat(angles, dim=-1)[:, :, None]
    return Angles(joined.cos().float(), joined.sin().float())


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), … of [B, tokens, heads, head_dim], in fp32."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = (first * angles.cos - second * angles.sin, first * angles.sin + second * angles.cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, angles: Angles) -> Tensor:
    """Attend from every token to every other: three times [B, tokens, heads, head_dim] to [B, tokens,
    dim]."""
    q, k = rotate(q, angles), rotate(k, angles)
    out = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).flatten(2)


def time_features(times: Tensor) -> Tensor:
    """Embed times, [B] between 0 and 1, as [B, 256] fp32: cosines and sines of a thousand times their values.

    Source: sinusoidal embedding as in arXiv 2006.11239, cosines first.
    """
    exponents = torch.arange(TIME_DIM // 2, dtype=torch.float32, device=times.device) / (TIME_DIM // 2)
    angles = 1000.0 * times.float()[:, None] * torch.exp(-math.log(10_000.0) * exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift normalized x by the conditions [B, 1, dim] (arXiv 2212.09748)."""
    return (1 + scale) * x + shift


class Features(nn.Module):
    """Maps [B, in_dim] to [B, dim] through a hidden layer."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(in_dim, dim)
        self.outer = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(silu(self.inner(x.to(self.inner.weight.dtype))))


class Attention(nn.Module):
    """Splits one stream's projection into queries, keys and values, and normalizes the first two."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_norm = nn.RMSNorm(dim // n_heads, eps=EPS)
        self.k_norm = nn.RMSNorm(dim // n_heads, eps=EPS)

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map [B, tokens, 3 dim] to three times [B, tokens, heads, head_dim]."""
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, -1)).unbind(2)
        return self.q_norm(q), self.k_norm(k), v


class Stream(nn.Module):
    """The weights of one stream, text or image, in a double block."""

    def __init__(self, dim: int, n_heads: int, hidden: int, *, qkv_bias: bool) -> None:
        super().__init__()
        self.modulation = nn.Linear(dim, 6 * dim)
        self.norm = nn.LayerNorm(dim, eps=EPS, elementwise_affine=False)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.heads = Attention(dim, n_heads)
        self.proj = nn.Linear(dim, dim)
        self.mlp_in = nn.Linear(dim, hidden)
        self.mlp_out = nn.Linear(hidden, dim)

    def conditions(self, vec: Tensor) -> tuple[Tensor, ...]:
        """Map [B, dim] to six times [B, 1, dim]: shift, scale and gate of attention, and of the
        feed-forward."""
        return self.modulation(silu(vec))[:, None].chunk(6, dim=-1)

    def project(self, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.heads(self.qkv(modulated(self.norm(x), shift, scale)))

    def finish(self, x: Tensor, attended: Tensor, conditions: tuple[Tensor, ...]) -> Tensor:
        gate, shift, scale, last_gate = conditions
        x = x + gate * self.proj(attended)
        hidden = gelu(self.mlp_in(modulated(self.norm(x), shift, scale)), approximate="tanh")
        return x + last_gate * self.mlp_out(hidden)


class DoubleBlock(nn.Module):
    """A double-stream block: text and image, with separate weights, share attention (arXiv 2403.03206)."""

    def __init__(self, dim: int, n_heads: int, hidden: int, *, qkv_bias: bool) -> None:
        super().__init__()
        self.image = Stream(dim, n_heads, hidden, qkv_bias=qkv_bias)
        self.text = Stream(dim, n_heads, hidden, qkv_bias=qkv_bias)

    def forward(self, image: Tensor, text: Tensor, vec: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Map [B, S, dim] and [B, T, dim] to the same shapes; angles are those of the text, then of the
        image."""
        for_image, for_text = self.image.conditions(vec), self.text.conditions(vec)
        of_text = self.text.project(text, *for_text[:2])
        of_image = self.image.project(image, *for_image[:2])
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(of_text, of_image, strict=True))
        attended = attend(q, k, v, angles)
        words = text.shape[1]
        image = self.image.finish(image, attended[:, words:], for_image[2:])
        text = self.text.finish(text, attended[:, :words], for_text[2:])
        return image, text


class SingleBlock(nn.Module):
    """A single-stream block with attention and feed-forward in parallel (arXiv 2302.05442)."""

    def __init__(self, dim: int, n_heads: int, hidden: int) -> None:
        super().__init__()
        self.widths = (3 * dim, hidden)
        self.modulation = nn.Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim, eps=EPS, elementwise_affine=False)
        self.inner = nn.Linear(dim, 3 * dim + hidden)
        self.heads = Attention(dim, n_heads)
        self.outer = nn.Linear(dim + hidden, dim)

    def forward(self, x: Tensor, vec: Tensor, angles: Angles) -> Tensor:
        """Map [B, T + S, dim] to the same shape."""
        shift, scale, gate = self.modulation(silu(vec))[:, None].chunk(3, dim=-1)
        qkv, hidden = self.inner(modulated(self.norm(x), shift, scale)).split(self.widths, dim=-1)
        q, k, v = self.heads(qkv)
        attended = attend(q, k, v, angles)
        return x + gate * self.outer(torch.cat((attended, gelu(hidden, approximate="tanh")), dim=-1))
