"""Attention within documents on a GPU, without a mask of S x S: torch's flex attention.

It stands for `titancli.models.blocks.attention` where a dense mask of documents would be needed, and is held
against it. What any query sees, be it of its document, a window or a chunk, is one run of keys that ends with
the query itself; where that run begins says all, which blocks of keys a block of queries needs included.
Source: arXiv 2412.05496.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from titancli.models.blocks.reach import Reach, document_positions

BLOCK = 128
"""Queries, and keys, of a block."""

# On a GPU only compiled code has kernels; inside of a compiled block this is part of its graph.
_compiled: Any = torch.compile(flex_attention)


def document_block_mask(document_ids: Tensor, reach: Reach) -> BlockMask:
    """What `titancli.models.blocks.reach.document_mask` says, as blocks.

    Args:
        document_ids: [B, S] integers; a document lies in one piece.
    """
    length = document_ids.shape[1]
    first = first_seen(document_ids, reach)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[row, query])

    blocks = torch.arange(-(-length // BLOCK), device=first.device)
    begin = blocks * BLOCK
    last = (begin + BLOCK - 1).clamp(max=length - 1)
    # Both grow with the query: the first one of a block sees farthest back, its last one least.
    farthest, nearest = first[:, begin, None], first[:, last, None]
    some = (begin <= last[:, None]) & (begin + BLOCK > farthest)
    every = (begin + BLOCK <= begin[:, None] + 1) & (begin >= nearest)
    every &= begin[:, None] + BLOCK <= length  # as torch has it, a short block is never whole
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def first_seen(document_ids: Tensor, reach: Reach) -> Tensor:
    """[B, S] int64: the first key in its row that each query sees."""
    position = document_positions(document_ids)
    query = torch.arange(document_ids.shape[1], device=document_ids.device)
    document = query - position
    first = document
    if reach.window is not None:
        first = torch.maximum(first, query - reach.window + 1)
    if reach.chunk is not None:
        first = torch.maximum(first, document + position // reach.chunk * reach.chunk)
    return first


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, rows, columns] bool to how many there are in each row, and their columns, those first; with a
    dimension for heads."""
    numbers = blocks.int()
    columns = numbers.argsort(dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32)[:, None], columns.int()[:, None]


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, scale: float, grouped: bool, sink: Tensor | None
) -> Tensor:
    """softmax(scale · q·kᵀ) · v of what the mask lets each query see.

    Args:
        q, k, v: as in `titancli.models.blocks.attention.attend`, without a sink's dimensions.
        sink: [B, S, heads], a logit that takes its share of the softmax and gives nothing; None: there is
            none.

    Returns:
        [B, S, heads, value_dim].
    """
    run = _compiled if q.device.type == "cuda" else flex_attention
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": grouped}
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if sink is None:
        return run(q, k, v, **options).transpose(1, 2)
    out, aux = run(q, k, v, return_aux=AuxRequest(lse=True), **options)
    share = torch.sigmoid(aux.lse - sink.transpose(1, 2).float())
    return (out * share[..., None].to(out.dtype)).transpose(1, 2)
