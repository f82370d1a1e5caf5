"""The block that decoders consist of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from titancli.models.blocks.moe import MoE
from titancli.models.blocks.norm import norm_of

if TYPE_CHECKING:
    from titancli.models.blocks.cache import LayerStep
    from titancli.protocols.shape import Block as Spec


class Block(nn.Module):
    """A decoder block, see `titancli.protocols.shape.Block`."""

    keeps_cache = True

    def __init__(self, spec: Spec) -> None:
        """Create the block; `spec.attention` builds a module that is called like
        `titancli.models.blocks.attention.Attention`."""
        super().__init__()
        self.norms, self.parallel, self.residual_scale = spec.norms, spec.parallel, spec.residual_scale
        made = {name: norm_of(spec.norm, spec.dim) for name in spec.norm_names}
        self.attention_norm = made["attention_norm"]
        self.attention = spec.attention.build()
        self.attention_post_norm = made.get("attention_post_norm")
        self.ffn_norm = made.get("ffn_norm")
        # Distinct names, so that patterns for one do not match the other.
        feed_forward = spec.feed_forward.build()
        self.moe = feed_forward if isinstance(feed_forward, MoE) else None
        self.feed_forward = None if isinstance(feed_forward, MoE) else feed_forward
        self.ffn_post_norm = made.get("ffn_post_norm")

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: LayerStep | None = None,
        routes: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Map [B, S, dim] to [B, S, dim]; `routes` and `padding` are for its experts, see `MoE.forward`."""
        x, given = self.attention_branch(x, cos, sin, mask, cache)
        if self.moe is not None:
            known = {"given": routes, "padding": padding}
            out = self.moe(given, **{name: value for name, value in known.items() if value is not None})
            x = self._plus(x, out, self.ffn_norm, self.ffn_post_norm)
        if self.feed_forward is not None:
            x = self._plus(x, self.feed_forward(given), self.ffn_norm, self.ffn_post_norm)
        return x

    def parts(self) -> list[tuple[nn.Module, str]]:
        """Return the methods that are compiled and checkpointed separately."""
        if self.moe is None:
            return [(self, "forward")]
        return [(self, "attention_branch"), *self.moe.parts()]

    def attention_branch(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerStep | None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and the input of the feed-forward."""
        after = self.norms == "after"
        entered = x if after else self.attention_norm(x)
        out = self.attention(entered, cos, sin, mask, cache)
        x = self._plus(x, out, self.attention_norm, self.attention_post_norm)
        if self.parallel:
            return x, entered
        return x, x if after or self.ffn_norm is None else self.ffn_norm(x)

    def _plus(self, x: Tensor, out: Tensor, norm: nn.Module | None, post: nn.Module | None) -> Tensor:
        """Add a branch's output to the residual stream; `norm` and `post` are the branch's norms."""
        last = norm if self.norms == "after" else post
        out = out if last is None else last(out)
        return x + (out if self.residual_scale == 1.0 else out * self.residual_scale)
