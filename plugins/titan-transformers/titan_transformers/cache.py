"""transformers' cache, as used in titan's generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from titan_transformers.parts import Parts


class Cache:
    """transformers' cache of a model's layers, for rows that grow together."""

    def __init__(self, parts: Parts, padding: Tensor | None) -> None:
        from transformers import DynamicCache

        self._parts = parts
        self._states = DynamicCache(config=parts.config)
        self._padding = padding
        self._used = 0

    def extend(self, base: Any, tokens: Tensor) -> Tensor:
        """Return the hidden states [B, S, dim] of tokens [B, S] that follow those in the cache.

        Raises:
            TitanError: RoPE would depend on other rows, or on earlier tokens.
        """
        start, self._used = self._used, self._used + tokens.shape[1]
        if (rope := self._parts.rope) is not None:
            alone = rope.kind == "longrope" and len(tokens) == 1 and not 0 < start <= rope.length
            rope.refuse(self._parts.config, 0 if alone else self._used)
        slots = torch.arange(self._used, device=tokens.device)
        positions, mask = slots[None, start:], None
        if self._padding is not None:
            padding = self._padding[:, None]
            positions, mask = (positions - padding).clamp(min=0), (slots >= padding).long()
        return base(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._states,
            use_cache=True,
        )[0]

    def select(self, rows: Tensor) -> None:
        """Select rows, see `titancli.protocols.Cache`."""
        self._states.batch_select_indices(rows)
        if self._padding is not None:
            self._padding = self._padding[rows]
