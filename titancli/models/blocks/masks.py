"""Attention masks: which keys of its document a query sees.

On a GPU no mask is S x S: whole rows have the bounds of their documents (`Documents`) where the kernel of
variable lengths takes them, and otherwise a block mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Union

import torch
from torch import Tensor

from titancli.models.blocks.attention_window import BLOCK, IN_ORDER, WHOLE, Piece, Reach, first_seen

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from titancli.protocols.batch import Spans

MOST_STARTED, MOST_DOCUMENTS = 16, 4
"""Limits of the kernel of variable lengths, for each block of the rows: it starts as many blocks for each
document as the longest one has, most of which end at once; and backward has a block of fp32 gradients for
each document."""


class Documents(NamedTuple):
    """The documents of whole rows, for the kernel of variable lengths (`titancli.models.blocks.flash`).

    `n` and `longest`, which the host must know, are powers of two, so that few kinds of batches are compiled.
    """

    ids: Tensor
    """[B, S] integers; each document is contiguous."""
    bounds: Tensor
    """[n + 1] int32: where documents begin among the B * S tokens, then B * S, at least once."""
    longest: int
    """No document has more tokens."""

    @classmethod
    def of(cls, document_ids: Tensor, reach: Reach, dtype: torch.dtype | None) -> Documents | None:
        """Return the documents, without waiting for the device; None where they need a block mask: with
        chunks, in fp32, in a CUDA graph, if the host has not seen the ids (`titancli.protocols.batch.Spans`),
        or if there are very many, or many beside a long one.

        Args:
            document_ids: [B, S] integers.
            dtype: of queries and keys.
        """
        spans: Spans | None = getattr(document_ids, "spans", None)
        half = dtype in (torch.bfloat16, torch.float16) and not torch.version.hip
        if spans is None or not half or reach.chunk is not None:
            return None
        if document_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # the graph would be replayed with the sizes of this batch
        rows, length = document_ids.shape
        count = _power_of_two(spans.documents)
        longest = min(length, max(BLOCK, _power_of_two(spans.longest)))
        blocks, started = -(-length // BLOCK), count * -(-longest // BLOCK)
        if started > MOST_STARTED * blocks or count > MOST_DOCUMENTS * blocks:
            return None
        number = begins(document_ids).flatten().cumsum(0)
        wanted = torch.arange(1, rows * count + 2, device=number.device)
        return cls(document_ids, torch.searchsorted(number, wanted, out_int32=True), longest)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


Mask = Union[Tensor, "BlockMask", Documents, tuple["Tensor | BlockMask", ...]]
"""[B or 1, 1, S, T], bool or a block mask (`titancli.models.blocks.flex`); documents of whole rows; or a
tuple of masks, see `document_masks`."""


MaskOf = Callable[..., "Mask | None"]
"""Maps a layer's reach, and the dtype of its queries, to its mask; None: the reach itself is enough. For
recurrent layers (`IN_ORDER`) the mask is [B, S] bool over whole rows, marking the first token of each
document."""


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
    """Return the masks of one forward pass; each is made once, however many layers use it.

    Args:
        document_ids: [B, S], whole rows.
        pieces: this rank's queries, under context parallelism. A mask is then a tuple with one mask per
            piece, of its queries and the keys given by `Piece.of`.
    """
    made: dict[Reach | None, Mask] = {}

    def of(reach: Reach | None, dtype: torch.dtype | None = None) -> Mask | None:
        if document_ids is None:
            return None
        if reach is IN_ORDER:
            return begins(document_ids)
        if reach not in made:
            make = _block_mask if document_ids.device.type == "cuda" else document_mask
            if pieces is None:
                bounds = Documents.of(document_ids, reach, dtype)
                made[reach] = make(document_ids, reach) if bounds is None else bounds
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
