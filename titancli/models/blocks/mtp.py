"""Multi-token prediction: blocks after the last, each of which predicts one token further ahead.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2). Where that is ambiguous, as in vLLM, SGLang and
Megatron-LM, which agree: hidden states are taken *after* the main model's final norm, or that of the previous
block, and the embedding comes first in the projection's input. Embedding and output are the main model's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from titancli.models.blocks.block import Block
from titancli.models.blocks.norm import norm_of
from titancli.protocols.batch import IGNORE, Batch

if TYPE_CHECKING:
    from titancli.protocols.shape import MTPBlock as Spec


class MTPBlock(Block):
    """A block over hidden states and the embeddings of tokens ahead, followed by its own norm."""

    styles: ClassVar = {"eh_proj": "replicate"}

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        dim = spec.dim
        self.enorm = norm_of(spec.norm, dim)
        self.hnorm = norm_of(spec.norm, dim)
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)
        self.head_norm = norm_of(spec.norm, dim)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        *,
        embedded: Tensor,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Map normalized hidden states [B, S, dim] to normalized ones that predict one token further ahead.

        Args:
            embedded: [B, S, dim], embedding of the token that the hidden states predict.
            padding: [B, S] bool, see `MoE.forward`.
        """
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), -1))
        return self.head_norm(super().forward(x, cos, sin, mask, padding=padding))


def further(x: Tensor, steps: int, fill: int) -> Tensor:
    """Return rows [B, S] shifted `steps` positions to the left, padded with `fill` at the end."""
    return pad(x, (0, steps), value=fill)[:, steps:]


def padding_ahead(batch: Batch, steps: int) -> Tensor:
    """Return the positions that the block reading the token `steps` positions ahead does not count, [B, S]
    bool: padding, and those whose token ahead is padding, of another document, or past the row."""
    tokens = batch["tokens"]
    own = batch["padding"] if "padding" in batch else torch.zeros_like(tokens, dtype=torch.bool)
    unread = own | further(own, steps, True)
    if "document_ids" in batch:
        ids = batch["document_ids"]
        unread = unread | (further(ids, steps, -1) != ids)
    return unread


def targets_ahead(batch: Batch, steps: int) -> Tensor:
    """Return the targets of the block that predicts `steps` tokens further ahead: [B, S] int64, and no
    target past the end of the row, or where the target or a token in between is of another document (or
    possibly so, after the row)."""
    targets = further(batch["targets"], steps, IGNORE)
    if "document_ids" in batch:
        ids = batch["document_ids"]
        known = torch.cat((ids, ids[:, -1:]), 1)
        for step in range(1, steps + 2):
            targets = targets.masked_fill(further(known, step, -1)[:, :-1] != ids, IGNORE)
    return targets
