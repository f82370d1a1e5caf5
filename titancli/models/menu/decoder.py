"""What the configs of decoders share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from annotated_types import Gt

from titancli.registry.component import section

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@section
class Sizes:
    """What every decoder has. A family adds its own fields, and gives these the defaults that it has."""

    dim: Annotated[int, Gt(0)]
    """Width of the residual stream."""
    n_layers: Annotated[int, Gt(0)]
    """Blocks."""
    n_heads: Annotated[int, Gt(0)]
    """Query heads."""
    vocab_size: Annotated[int, Gt(0)]
    """Rows of the embedding and of the output."""
    max_seq_len: Annotated[int, Gt(0)]
    """The longest row it is meant for."""
    rope_theta: Annotated[float, Gt(0)]
    """Base of the rotary frequencies."""
    norm_eps: Annotated[float, Gt(0)]
    """Added to the mean square inside the norms."""
    tied: bool = False
    """Whether the output uses the embedding's weight."""

    # Fields that do not change what the model computes from tokens and weights.
    without_effect: ClassVar[tuple[str, ...]] = ("max_seq_len",)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.training.seq_len > self.max_seq_len:
            yield (
                "max_seq_len",
                f"training.seq_len {recipe.training.seq_len} is beyond the model's {self.max_seq_len}",
            )


@section
class DecoderConfig(Sizes):
    """A decoder with grouped-query attention."""

    n_kv_heads: Annotated[int, Gt(0)] | None = None
    """Key and value heads; None: n_heads."""
    head_dim: Annotated[int, Gt(0)] | None = None
    """Width of a head; None: dim / n_heads."""

    def explicit(self) -> Self:
        """The same, with what follows from other fields written out."""
        return replace(self, n_kv_heads=self.kv_heads, head_dim=self.head_width)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        """Numbers of a head."""
        return self.head_dim or self.dim // self.n_heads

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.head_dim is None and self.dim % self.n_heads:
            yield "n_heads", f"dim {self.dim} is not divisible by n_heads {self.n_heads}; give head_dim"
        elif self.head_width % 2:
            yield "head_dim", "rotary embedding needs an even head_dim"
        if self.n_heads % self.kv_heads:
            yield "n_kv_heads", f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.kv_heads}"
        yield from super().check(recipe)
