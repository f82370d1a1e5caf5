"""transformers' cache, as titan generates with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from titan_transformers.parts import Parts


class Cache:
    """transformers' cache of a model's layers: a `titancli.protocols.Cache` of rows that begin together,
    padded on the left, and grow together."""

    apart = True
    """See `titancli.protocols.CacheDefaults`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._states: Any = None
        self._padding: Tensor | None = None
        self._used = 0
        self._size = 0
        """Rows of the states."""
        self._numbers: dict[int, int] = {}
        """By a row's number, which row of the states it has; -1: it is empty."""
        self._counts: list[int] = []

    def begin(self) -> int:
        """See `titancli.protocols.Cache`."""
        return self._new(-1)

    def _new(self, at: int) -> int:
        number = max(self._numbers, default=-1) + 1
        self._numbers[number] = at
        return number

    def fork(self, row: int, count: int) -> list[int]:
        """See `titancli.protocols.Cache`."""
        return [self._new(self._numbers[row]) for _ in range(count)]

    def close(self, row: int) -> None:
        """See `titancli.protocols.Cache`."""
        del self._numbers[row]

    def extend(self, rows: Sequence[int], counts: Sequence[int], device: torch.device) -> Cache:
        """See `titancli.protocols.Cache`."""
        from transformers import DynamicCache

        at = [self._numbers[row] for row in rows]
        longest = max(counts)
        if min(at) < 0:
            self._states, self._used = DynamicCache(config=self._parts.config), 0
            lacking = [longest - count for count in counts]
            self._padding = torch.tensor(lacking, device=device) if any(lacking) else None
        elif at != list(range(self._size)):
            chosen = torch.tensor(at, device=device)
            self._states.batch_select_indices(chosen)
            self._padding = None if self._padding is None else self._padding[chosen]
        self._numbers.update((row, place) for place, row in enumerate(rows))
        self._size, self._counts = len(rows), list(counts)
        return self

    def run(self, base: Any, tokens: Tensor) -> Tensor:
        """Hidden states [R, dim] of the last token of each row, for the tokens [1, N] of the rows that are
        extended.

        Raises:
            TitanError: they come to where RoPE depends on other rows, or on what was there before.
        """
        rows = pad_sequence(tokens[0].split(self._counts), batch_first=True, padding_side="left")
        start, self._used = self._used, self._used + rows.shape[1]
        if (rope := self._parts.rope) is not None:
            alone = rope.kind == "longrope" and len(rows) == 1 and not 0 < start <= rope.length
            rope.refuse(self._parts.config, 0 if alone else self._used)
        slots = torch.arange(self._used, device=tokens.device)
        positions, mask = slots[None, start:], None
        if self._padding is not None:
            padding = self._padding[:, None]
            positions, mask = (positions - padding).clamp(min=0), (slots >= padding).long()
        hidden: Tensor = base(
            input_ids=rows,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._states,
            use_cache=True,
        )[0]
        return hidden[:, -1]
