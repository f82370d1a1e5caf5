"""The KV cache of generation: keys and values of the tokens so far.

A cache is made by a model's `new_cache`, filled by its `forward(tokens, cache=cache)`, and never used in
training. Its rows grow together: each call adds the same number of tokens to every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titancli.models.blocks.masks import MaskOf
from titancli.models.blocks.reach import IN_ORDER, Reach


class LayerCache:
    """Keys and values of one layer.

    Memory is allocated at the first call, to match its input: heads may be a shard's, and the dtype is the
    layer's.
    """

    def __init__(self, length: int) -> None:
        """Create an empty cache; `length` is the maximum number of tokens in a row."""
        self._length = length
        self._used = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, [B, S, heads, width] each, and return all so far, [B, T, heads, width]."""
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                x.new_empty(len(x), self._length, *x.shape[2:]) for x in (keys, values)
            )
        start, self._used = self._used, self._used + keys.shape[1]
        self._keys[:, start : self._used] = keys
        self._values[:, start : self._used] = values
        return self._keys[:, : self._used], self._values[:, : self._used]

    def select(self, rows: Tensor) -> None:
        """Select rows, see `KVCache.select`."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._selected(self._keys, rows), self._selected(self._values, rows)

    def _selected(self, whole: Tensor, rows: Tensor) -> Tensor:
        """Return the selected rows; only the filled part is copied."""
        kept = whole.new_empty(len(rows), *whole.shape[1:])
        kept[:, : self._used] = whole[:, : self._used][rows]
        return kept


class StateCache:
    """State of a recurrent layer: tensors of fixed size per row, however long the row is."""

    def __init__(self, length: int) -> None:
        self.state: tuple[Tensor, Tensor] | None = None

    def select(self, rows: Tensor) -> None:
        """Select rows, see `KVCache.select`."""
        if self.state is not None:
            self.state = self.state[0][rows], self.state[1][rows]


class KVCache:
    """Keys and values of every layer, and the positions and masks that follow from their number."""

    def __init__(self, layers: Mapping[str, Any], length: int, padding: Tensor | None = None) -> None:
        """Create an empty cache.

        Args:
            layers: the attention of each layer, by name.
            length: maximum number of tokens in a row, padding included.
            padding: [B] int64, number of padding tokens at the beginning of each row, so that rows of unequal
                length end together; None: no padding.
        """
        self.layers: dict[str, LayerCache | StateCache] = {
            name: (StateCache if attention.reach is IN_ORDER else LayerCache)(length)
            for name, attention in layers.items()
        }
        self.used = 0
        """Tokens seen in each row, padding included."""
        self.padding = padding

    def advance(self, count: int, device: torch.device) -> tuple[Tensor, MaskOf]:
        """Make room for `count` more tokens in every row.

        Returns:
            Their positions, [B or 1, count] int64, and the masks over all T tokens so far. No mask is needed
                if a first call is plainly causal, or for a single token that sees everything.
        """
        start, self.used = self.used, self.used + count
        slots = torch.arange(start, self.used, device=device)
        keys = torch.arange(self.used, device=device)
        padding = 0 if self.padding is None else self.padding[:, None]
        made: dict[Reach, Tensor] = {}

        def mask(reach: Reach | None) -> Tensor | None:
            if reach is IN_ORDER:  # padding counts as a document of its own
                return None if self.padding is None else slots == padding
            alone = count == 1 and not reach.limits(self.used)
            if self.padding is None and (start == 0 or alone):
                return None
            if reach not in made:
                made[reach] = _seen(reach, slots, keys, padding)
            return made[reach]

        return slots[None] - padding, mask

    def select(self, rows: Tensor) -> None:
        """Keep these rows ([N] int64), in this order; rows may be repeated."""
        for layer in self.layers.values():
            layer.select(rows)
        if self.padding is not None:
            self.padding = self.padding[rows]


def _seen(reach: Reach, slots: Tensor, keys: Tensor, padding: Tensor | int) -> Tensor:
    """Return which keys queries see, [B or 1, 1, S, T] bool, for queries at `slots` [S] of `keys` [T] and
    rows that begin after their padding, [B, 1]."""
    starts = padding[..., None] if isinstance(padding, Tensor) else padding
    queries, keys = slots[None, :, None] - starts, keys[None, None, :] - starts
    # Padding sees itself: a query without any key would give NaN.
    return ((reach.seen(queries, keys) & (keys >= 0)) | (keys == queries))[:, None]
