"""Attention within documents on a GPU without a mask of S x S: torch's flex attention.

It replaces a dense document mask where the kernel of variable lengths is not for the documents
(`titancli.models.blocks.masks.Documents`), and is tested against it. The keys that a query sees, in its
document, a window or a chunk, are one run that ends with the query itself; so the run's start determines
everything, including which blocks of keys a block of queries needs. Source: arXiv 2412.05496.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from titancli.models.blocks.attention_window import BLOCK, Piece, Reach, first_seen

LEAST = 16
"""Minimum width of heads that torch's GPU kernels support."""

# Only compiled code has GPU kernels; inside a compiled block this is part of its graph.
_compiled: Any = torch.compile(flex_attention)


def document_block_mask(document_ids: Tensor, reach: Reach, piece: Piece | None = None) -> BlockMask:
    """Return `titancli.models.blocks.masks.document_mask` as a block mask.

    Args:
        document_ids: [B, S] integers; each document is contiguous.
        piece: restrict the mask to these queries and keys.
    """
    length = document_ids.shape[1]
    queries, keys = piece or Piece(range(length), range(length))
    # From here on, both are counted from the piece's first query and key.
    ahead, first = queries.start - keys.start, first_seen(document_ids, reach)
    first = first[:, queries.start : queries.stop] - keys.start

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + ahead) & (key >= first[row, query])

    begin = torch.arange(0, len(queries), BLOCK, device=first.device)[:, None]
    last = (begin + BLOCK - 1).clamp(max=len(queries) - 1)
    key = torch.arange(0, len(keys), BLOCK, device=first.device)
    # Both grow with the query: a block's first query sees farthest back, its last one least.
    farthest, nearest = first[:, begin[:, 0], None], first[:, last[:, 0], None]
    some = (key <= last + ahead) & (key + BLOCK > farthest)
    every = (key + BLOCK <= begin + ahead + 1) & (key >= nearest)
    # As in torch, a short block is never full.
    every &= (begin + BLOCK <= len(queries)) & (key + BLOCK <= len(keys))
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(queries), len(keys)),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Turn [B, rows, columns] bool into the count per row, and the column indices, selected ones first;
    with a dimension for heads."""
    numbers = blocks.int()
    columns = numbers.argsort(dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32)[:, None], columns.int()[:, None]


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    scale: float,
    grouped: bool,
    sinks: Tensor | None,
    cap: float | None = None,
) -> Tensor:
    """Return softmax(scale · q·kᵀ) · v over the keys that the mask allows for each query.

    Args:
        q, k, v, sinks: as in `titancli.models.blocks.attention.attend`.
        cap: scores x become cap · tanh(x / cap); None: no cap.

    Returns:
        [B, S, heads, value_dim].
    """
    run = _compiled if q.device.type == "cuda" else flex_attention
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": grouped}
    if cap is not None:
        options["score_mod"] = lambda score, *_: torch.tanh(score / cap) * cap
    width = v.shape[-1]
    q, k, v = (_filled(x.transpose(1, 2)) for x in (q, k, v))
    if sinks is None:
        return run(q, k, v, **options).transpose(1, 2)[..., :width]
    out, aux = run(q, k, v, return_aux=AuxRequest(lse=True), **options)
    share = torch.sigmoid(aux.lse - sinks.float()[:, None])
    return (out * share[..., None].to(out.dtype)).transpose(1, 2)[..., :width]


def _filled(x: Tensor) -> Tensor:
    """Pad heads with zeros to the kernels' minimum width, which changes no product."""
    return pad(x, (0, LEAST - x.shape[-1])) if x.shape[-1] < LEAST else x
