"""Multi-token prediction: blocks beyond the last, each of which predicts one token further.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2); where that leaves it open, as in vLLM, SGLang and
Megatron-LM, which agree: hidden states come *after* the main model's final norm, or that of the block before,
and the embedding stands first in the product's input. Embedding and output are those of the main model.
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
    """A block over hidden states and the embeddings of tokens ahead, followed by a norm of its own."""

    styles: ClassVar = {"eh_proj": "replicate"}

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        dim = spec.dim
        self.enorm = norm_of(spec.norm, dim)
        self.hnorm = norm_of(spec.norm, dim)
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)
        self.head_norm = norm_of(spec.norm, dim)

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, *, embedded: Tensor
    ) -> Tensor:
        """Hidden states [B, S, dim], normed, to those that predict one token further, normed.

        Args:
            embedded: [B, S, dim], the token that the hidden states were to predict.
        """
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), -1))
        return self.head_norm(super().forward(x, cos, sin, mask))


def further(x: Tensor, steps: int, fill: int) -> Tensor:
    """Return what stands so many places further along rows [B, S], and `fill` where they have ended."""
    return pad(x, (0, steps), value=fill)[:, steps:]


def targets_ahead(batch: Batch, steps: int) -> Tensor:
    """Return the targets of the block that looks so many tokens further: [B, S] int64, none where the row has
    ended, or where a token on the way or the target is of another document (the one after a row is not known
    to be)."""
    targets = further(batch["targets"], steps, IGNORE)
    if "document_ids" in batch:
        ids = batch["document_ids"]
        known = torch.cat((ids, ids[:, -1:]), 1)
        for step in range(1, steps + 2):
            targets = targets.masked_fill(further(known, step, -1)[:, :-1] != ids, IGNORE)
    return targets
