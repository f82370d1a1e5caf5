"""How far back a token sees, and the masks that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

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

MaskOf = Callable[[Reach], "Tensor | BlockMask | None"]
"""The mask [B or 1, 1, S, T] of layers that see so far, bool or as blocks (`titancli.models.blocks.flex`);
None: none is needed beside the reach itself."""


def document_positions(document_ids: Tensor) -> Tensor:
    """[B, S] int64: how many tokens of its document are before each token; a document lies in one piece."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def document_mask(document_ids: Tensor, reach: Reach = WHOLE) -> Tensor:
    """[B, 1, S, S] bool: a token sees those before it, and itself, within its document and its reach.

    Args:
        document_ids: [B, S] integers; a document lies in one piece.
    """
    length = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    if reach.limits(length):
        positions = document_positions(document_ids)
        same &= reach.seen(positions[:, :, None], positions[:, None, :])
    return same.tril_().view(-1, 1, length, length)


def document_masks(document_ids: Tensor | None, *, dense: bool = False) -> MaskOf:
    """The masks of one forward; each is made once, whatever layers ask for it.

    Args:
        dense: whether bool masks are needed on a GPU too, where blocks are quicker and take no S x S.
    """
    made: dict[Reach, Tensor | BlockMask] = {}
    in_blocks = document_ids is not None and document_ids.device.type == "cuda" and not dense

    def of(reach: Reach) -> Tensor | BlockMask | None:
        if document_ids is None:
            return None
        if reach not in made:
            make = _block_mask if in_blocks else document_mask
            made[reach] = make(document_ids, reach)
        return made[reach]

    return of


def _block_mask(document_ids: Tensor, reach: Reach) -> BlockMask:
    from titancli.models.blocks.flex import document_block_mask  # brings torch's compiler

    return document_block_mask(document_ids, reach)
