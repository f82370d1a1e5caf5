"""The block that most decoders are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from titancli.models.blocks.feed_forward import FeedForward
from titancli.models.blocks.moe import MoE

if TYPE_CHECKING:
    from titancli.models.blocks.cache import LayerCache


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream, with norms before or after them."""

    def __init__(
        self,
        dim: int,
        norm_eps: float,
        attention: nn.Module,
        feed_forward: FeedForward | MoE,
        norm: type[nn.RMSNorm] = nn.RMSNorm,
        *,
        norms_after: bool = False,
    ) -> None:
        """`attention`: called as `titancli.models.blocks.attention.Attention` is."""
        super().__init__()
        self.norms_after = norms_after
        self.attention_norm = norm(dim, eps=norm_eps)
        self.attention = attention
        self.ffn_norm = norm(dim, eps=norm_eps)
        # Under names that say which it is: patterns for one should not match the other.
        self.moe = feed_forward if isinstance(feed_forward, MoE) else None
        self.feed_forward = feed_forward if isinstance(feed_forward, FeedForward) else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache | None = None
    ) -> Tensor:
        """[B, S, dim] -> [B, S, dim]."""
        x, given = self.attention_branch(x, cos, sin, mask, cache)
        for branch in (self.moe, self.feed_forward):
            if branch is not None:
                x = x + (self.ffn_norm(branch(given)) if self.norms_after else branch(given))
        return x

    def parts(self) -> list[tuple[nn.Module, str]]:
        """The methods that are compiled, and run again in backward, each for itself."""
        if self.moe is None:
            return [(self, "forward")]
        return [(self, "attention_branch"), *self.moe.parts()]

    def attention_branch(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and what feed-forward is given of it."""
        if self.norms_after:
            x = x + self.attention_norm(self.attention(x, cos, sin, mask, cache))
            return x, x
        x = x + self.attention(self.attention_norm(x), cos, sin, mask, cache)
        return x, self.ffn_norm(x)
