"""How far back a token sees, and the masks that say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


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

Mask = Union[Tensor, "BlockMask", tuple["Tensor | BlockMask", ...]]
"""[B or 1, 1, S, T], bool or as blocks (`titancli.models.blocks.flex`); a tuple of them: `document_masks`."""
MaskOf = Callable[[Reach], "Mask | None"]
"""The mask of layers that see so far; None: none is needed beside the reach itself."""


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


def document_mask(document_ids: Tensor, reach: Reach = WHOLE, piece: Piece | None = None) -> Tensor:
    """[B, 1, S, S] bool: a token sees those before it, and itself, within its document and its reach.

    Args:
        document_ids: [B, S] integers; a document lies in one piece.
        piece: of these queries and keys alone, [B, 1, queries, keys].
    """
    length = document_ids.shape[1]
    queries, keys = piece or Piece(range(length), range(length))
    query = torch.arange(queries.start, queries.stop, device=document_ids.device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=document_ids.device)
    # Documents lie in one piece: where the keys of a query begin says all.
    first = first_seen(document_ids, reach)[:, queries.start : queries.stop, None]
    return ((key >= first) & (key <= query))[:, None]


def document_masks(document_ids: Tensor | None, pieces: Sequence[range] | None = None) -> MaskOf:
    """The masks of one forward; each is made once, whatever layers ask for it. On a GPU they are blocks,
    which are quicker and take no S x S.

    Args:
        document_ids: [B, S], whole rows.
        pieces: the queries that are here, where context parallel has others elsewhere. A mask is then a
            tuple, for each of the pieces one of its queries and of the keys that `Piece.of` says.
    """
    made: dict[Reach, Mask] = {}

    def of(reach: Reach) -> Mask | None:
        if document_ids is None:
            return None
        if reach not in made:
            make: Any = _block_mask if document_ids.device.type == "cuda" else document_mask
            if pieces is None:
                made[reach] = make(document_ids, reach)
            else:
                made[reach] = tuple(make(document_ids, reach, Piece.of(piece, reach)) for piece in pieces)
        return made[reach]

    return of


def _block_mask(document_ids: Tensor, reach: Reach, piece: Piece | None = None) -> BlockMask:
    from titancli.models.blocks.flex import document_block_mask  # brings torch's compiler

    return document_block_mask(document_ids, reach, piece)
