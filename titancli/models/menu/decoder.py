"""What is wrong with the sizes of a decoder, whichever family it is of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


class Sizes(Protocol):
    """The fields that are read."""

    @property
    def dim(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int | None: ...
    @property
    def head_dim(self) -> int | None: ...
    @property
    def max_seq_len(self) -> int: ...


def size_problems(config: Sizes, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Keys of a decoder with grouped-query attention, with what is wrong."""
    kv_heads = config.n_kv_heads or config.n_heads
    if config.head_dim is None and config.dim % config.n_heads:
        yield "n_heads", f"dim {config.dim} is not divisible by n_heads {config.n_heads}; give head_dim"
    elif (config.head_dim or config.dim // config.n_heads) % 2:
        yield "head_dim", "rotary embedding needs an even head_dim"
    if config.n_heads % kv_heads:
        yield "n_kv_heads", f"n_heads {config.n_heads} is not divisible by n_kv_heads {kv_heads}"
    if recipe.training.seq_len > config.max_seq_len:
        yield (
            "max_seq_len",
            f"training.seq_len {recipe.training.seq_len} is beyond the model's {config.max_seq_len}",
        )
