"""How far back a token sees within its document."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Reach(NamedTuple):
    """How far back a token sees within its document. Both limits may apply at once."""

    window: int | None = None
    """Maximum number of tokens, itself included (sliding window); None: all before it."""
    chunk: int | None = None
    """Restricts a token to its own chunk of this many tokens, counted from its document's beginning; None:
    no chunks."""

    @property
    def most(self) -> int | None:
        """Maximum number of tokens that a token sees; None: unlimited."""
        limits = [limit for limit in self if limit is not None]
        return min(limits) if limits else None

    def limits(self, length: int) -> bool:
        """Return whether a token in a row of this length may not see all tokens before it."""
        return self.most is not None and self.most < length

    def first(self, position: int) -> int:
        """Return the first key that this query, or any later one, may see."""
        return 0 if self.most is None else max(0, position - self.most + 1)

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return which keys each query sees, bool, for positions that broadcast with each other."""
        found = keys <= queries
        if self.window is not None:
            found = found & (keys > queries - self.window)
        if self.chunk is not None:
            found = found & (keys // self.chunk == queries // self.chunk)
        return found

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Return the mask of one document that begins at position 0, [queries, keys] bool."""
        q = torch.arange(queries.start, queries.stop, device=device)
        k = torch.arange(keys.start, keys.stop, device=device)
        return self.seen(q[:, None], k)


BLOCK = 128
"""Queries, and keys, that a GPU's kernels process together."""
WHOLE = Reach()
"""A token sees itself and everything before it."""
IN_ORDER = None
"""The reach of a recurrent layer."""


def document_positions(document_ids: Tensor) -> Tensor:
    """Return each token's position in its document, [B, S] int64; each document is contiguous."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def first_seen(document_ids: Tensor, reach: Reach) -> Tensor:
    """Return the first key in its row that each query sees, [B, S] int64; it never decreases along a row."""
    position = document_positions(document_ids)
    query = torch.arange(document_ids.shape[1], device=document_ids.device)
    document = query - position
    first = document
    if reach.window is not None:
        first = torch.maximum(first, query - reach.window + 1)
    if reach.chunk is not None:
        first = torch.maximum(first, document + position // reach.chunk * reach.chunk)
    return first


class Piece(NamedTuple):
    """Some queries of a row, and the keys that any of them may see."""

    queries: range
    keys: range

    @classmethod
    def of(cls, queries: range, reach: Reach) -> Piece:
        return cls(queries, range(reach.first(queries.start), queries.stop))
