"""Attention masks: which keys of its document a query sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from titancli.models.blocks.reach import IN_ORDER, WHOLE, Piece, Reach, first_seen

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mask = Union[Tensor, "BlockMask", tuple["Tensor | BlockMask", ...]]
"""[B or 1, 1, S, T], bool or a block mask (`titancli.models.blocks.flex`); or a tuple of them, see
`document_masks`."""
MaskOf = Callable[["Reach | None"], "Mask | None"]
"""Maps a layer's reach to its mask; None: the reach itself is enough. For recurrent layers (`IN_ORDER`)
the mask is [B, S] bool over whole rows, marking the first token of each document."""


def document_mask(document_ids: Tensor, reach: Reach = WHOLE, piece: Piece | None = None) -> Tensor:
    """Return [B, 1, S, S] bool: a token sees itself and the tokens before it, within its document and its
    reach.

    Args:
        document_ids: [B, S] integers; each document is contiguous.
        piece: restrict the mask to these queries and keys, [B, 1, queries, keys].
    """
    length = document_ids.shape[1]
    queries, keys = piece or Piece(range(length), range(length))
    query = torch.arange(queries.start, queries.stop, device=document_ids.device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=document_ids.device)
    # Documents are contiguous, so a query's first key determines the rest.
    first = first_seen(document_ids, reach)[:, queries.start : queries.stop, None]
    return ((key >= first) & (key <= query))[:, None]


def document_masks(document_ids: Tensor | None, pieces: Sequence[range] | None = None) -> MaskOf:
    """Return the masks of one forward pass; each is made once, however many layers use it. On a GPU they are
    block masks, which are faster and never S x S.

    Args:
        document_ids: [B, S], whole rows.
        pieces: this rank's queries, under context parallelism. A mask is then a tuple with one mask per
            piece, of its queries and the keys given by `Piece.of`.
    """
    made: dict[Reach | None, Mask] = {}

    def of(reach: Reach | None) -> Mask | None:
        if document_ids is None:
            return None
        if reach is IN_ORDER:
            return begins(document_ids)
        if reach not in made:
            make: Any = _block_mask if document_ids.device.type == "cuda" else document_mask
            if pieces is None:
                made[reach] = make(document_ids, reach)
            else:
                made[reach] = tuple(make(document_ids, reach, Piece.of(piece, reach)) for piece in pieces)
        return made[reach]

    return of


def begins(document_ids: Tensor) -> Tensor:
    """Return the first tokens of documents, [B, S] bool."""
    return torch.cat((torch.ones_like(document_ids[:, :1]), document_ids.diff(dim=1)), 1) != 0


def _block_mask(document_ids: Tensor, reach: Reach, piece: Piece | None = None) -> BlockMask:
    from titancli.models.blocks.flex import document_block_mask  # imports torch's compiler

    return document_block_mask(document_ids, reach, piece)
