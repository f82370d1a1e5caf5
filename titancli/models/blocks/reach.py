"""How far back a token sees within its document."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Reach(NamedTuple):
    """How far back a token sees within its document. Both limits may hold at once."""

    window: int | None = None
    """Tokens at most, itself included (sliding window); None: all before it."""
    chunk: int | None = None
    """Only tokens of its own chunk of so many, counted from its document's beginning; None: no chunks."""

    @property
    def most(self) -> int | None:
        """Tokens that any token sees at most; None: there is no such number."""
        limits = [limit for limit in self if limit is not None]
        return min(limits) if limits else None

    def limits(self, length: int) -> bool:
        """Whether a token of a row so long may not see all that is before it."""
        return self.most is not None and self.most < length

    def first(self, position: int) -> int:
        """A key before which none is seen by this query or by one that comes after it."""
        return 0 if self.most is None else max(0, position - self.most + 1)

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Bool: which keys each query sees, for positions that broadcast with each other."""
        found = keys <= queries
        if self.window is not None:
            found = found & (keys > queries - self.window)
        if self.chunk is not None:
            found = found & (keys // self.chunk == queries // self.chunk)
        return found

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """[queries, keys] bool, of one document that begins at position 0."""
        q = torch.arange(queries.start, queries.stop, device=device)
        k = torch.arange(keys.start, keys.stop, device=device)
        return self.seen(q[:, None], k)


WHOLE = Reach()
"""All that is before a token, and itself."""
IN_ORDER = None
"""The reach of a layer that does not look back but goes through a row token by token."""


def document_positions(document_ids: Tensor) -> Tensor:
    """[B, S] int64: how many tokens of its document are before each token; a document lies in one piece."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def first_seen(document_ids: Tensor, reach: Reach) -> Tensor:
    """[B, S] int64: the first key in its row that each query sees; it never falls from one to the next."""
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
