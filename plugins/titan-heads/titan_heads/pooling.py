"""Hidden states of documents, from those of their tokens.

A target marks the last token of each document (`titan_heads.data`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from titancli import IGNORE

if TYPE_CHECKING:
    from torch import Tensor

    from titancli import Batch


def fine(x: Tensor) -> Tensor:
    """Return a tensor in fp32, or in its own dtype if that is finer."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def last(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last position of each row that has a target, [B] int64, and whether there is one, [B]."""
    there = targets != IGNORE
    places = torch.arange(targets.shape[1], device=targets.device)
    return torch.where(there, places, 0).amax(1), there.any(1)


def pooled(hidden: Tensor, batch: Batch, pool: str = "last") -> tuple[Tensor, Tensor]:
    """Return the hidden state of each row's document, [B, D], and whether the row has one, [B].

    Args:
        hidden: [B, S, D], of the tokens.
        batch: with one document in each row.
        pool: "last" for the last token's, "mean" for the mean over the document's tokens.
    """
    hidden = fine(hidden)
    at, there = last(batch["targets"])
    if pool == "last":
        return hidden[torch.arange(len(at), device=at.device), at], there
    places = torch.arange(hidden.shape[1], device=at.device)
    inside = (places <= at[:, None]).to(hidden.dtype)
    return (hidden * inside[:, :, None]).sum(1) / (at + 1)[:, None], there
