"""The masks of attention: which keys a query sees of its document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from titancli.models.blocks.reach import IN_ORDER, WHOLE, Piece, Reach, first_seen

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mask = Union[Tensor, "BlockMask", tuple["Tensor | BlockMask", ...]]
"""[B or 1, 1, S, T], bool or as blocks (`titancli.models.blocks.flex`); a tuple of them: `document_masks`."""
MaskOf = Callable[["Reach | None"], "Mask | None"]
"""The mask of layers that see so far; None: none is needed beside the reach itself. Of layers that go through
rows in order (`IN_ORDER`): [B, S] bool, the tokens with which a document begins, of whole rows."""


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
    """[B, S] bool: the tokens with which a document begins."""
    return torch.cat((torch.ones_like(document_ids[:, :1]), document_ids.diff(dim=1)), 1) != 0


def _block_mask(document_ids: Tensor, reach: Reach, piece: Piece | None = None) -> BlockMask:
    from titancli.models.blocks.flex import document_block_mask  # brings torch's compiler

    return document_block_mask(document_ids, reach, piece)
