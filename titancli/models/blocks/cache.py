"""What generation keeps of the tokens that a model has seen: their keys and values.

A cache is made by a model's `new_cache`, filled by its `forward(tokens, cache=cache)`, and never used in
training. It holds rows that grow together: each call adds the same number of tokens to every row.
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

    Memory is taken at the first call, from what comes: so the heads may be a shard's, and the dtype is the
    one that the layer computes in.
    """

    def __init__(self, length: int) -> None:
        """`length`: how many tokens a row can have."""
        self._length = length
        self._used = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values, [B, S, heads, width] each, and return all so far, [B, T, heads, width]."""
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                x.new_empty(len(x), self._length, *x.shape[2:]) for x in (keys, values)
            )
        start, self._used = self._used, self._used + keys.shape[1]
        self._keys[:, start : self._used] = keys
        self._values[:, start : self._used] = values
        return self._keys[:, : self._used], self._values[:, : self._used]

    def select(self, rows: Tensor) -> None:
        """See `KVCache.select`."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._selected(self._keys, rows), self._selected(self._values, rows)

    def _selected(self, whole: Tensor, rows: Tensor) -> Tensor:
        """Only what is filled is copied."""
        kept = whole.new_empty(len(rows), *whole.shape[1:])
        kept[:, : self._used] = whole[:, : self._used][rows]
        return kept


class StateCache:
    """What a layer that goes through rows in order has of them: tensors of a row each, however long it is."""

    def __init__(self, length: int) -> None:
        self.state: tuple[Tensor, Tensor] | None = None

    def select(self, rows: Tensor) -> None:
        """See `KVCache.select`."""
        if self.state is not None:
            self.state = self.state[0][rows], self.state[1][rows]


class KVCache:
    """Keys and values of every layer, and what follows from their number: positions and the mask."""

    def __init__(self, layers: Mapping[str, Any], length: int, padding: Tensor | None = None) -> None:
        """An empty cache.

        Args:
            layers: the attention of each, by name.
            length: how many tokens a row can have, padding included.
            padding: [B] int64, how many tokens at the beginning of each row are not part of it, so that rows
                of unequal length end together; None: none in any row.
        """
        self.layers: dict[str, LayerCache | StateCache] = {
            name: (StateCache if attention.reach is IN_ORDER else LayerCache)(length)
            for name, attention in layers.items()
        }
        self.used = 0
        """Tokens seen of each row, padding included."""
        self.padding = padding

    def advance(self, count: int, device: torch.device) -> tuple[Tensor, MaskOf]:
        """Make room for `count` more tokens in every row.

        Returns:
            Their positions, [B or 1, count] int64, and the masks over all T tokens so far. No mask is needed
            where a first call is plainly causal, and for a single token that sees all.
        """
        start, self.used = self.used, self.used + count
        slots = torch.arange(start, self.used, device=device)
        keys = torch.arange(self.used, device=device)
        padding = 0 if self.padding is None else self.padding[:, None]
        made: dict[Reach, Tensor] = {}

        def mask(reach: Reach | None) -> Tensor | None:
            if reach is IN_ORDER:  # what pads a row is a document before it
                return None if self.padding is None else slots == padding
            alone = count == 1 and not reach.limits(self.used)
            if self.padding is None and (start == 0 or alone):
                return None
            if reach not in made:
                made[reach] = _seen(reach, slots, keys, padding)
            return made[reach]

        return slots[None] - padding, mask

    def select(self, rows: Tensor) -> None:
        """Keep these rows ([N] int64), in this order; a row that is named twice is there twice."""
        for layer in self.layers.values():
            layer.select(rows)
        if self.padding is not None:
            self.padding = self.padding[rows]


def _seen(reach: Reach, slots: Tensor, keys: Tensor, padding: Tensor | int) -> Tensor:
    """[B or 1, 1, S, T] bool, for tokens that stand in `slots` [S] of `keys` [T] and rows that begin after
    their padding, [B, 1]."""
    starts = padding[..., None] if isinstance(padding, Tensor) else padding
    queries, keys = slots[None, :, None] - starts, keys[None, None, :] - starts
    # Padding sees itself: a row of the mask without any token would give no number at all.
    return ((reach.seen(queries, keys) & (keys >= 0)) | (keys == queries))[:, None]
