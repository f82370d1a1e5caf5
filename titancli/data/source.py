"""What a source of documents is, and how their order is drawn.

Everything between documents and batches (tokenising, packing, dealing rows to ranks, positions) is the same
for all datasets and lives in `stream.py` and `packing.py`; a source only reads text from any place in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np


class Piece(NamedTuple):
    """A document, or a part of a long one, that is tokenised by itself."""

    text: str
    begins: bool
    """The first piece of its document."""
    ends: bool
    """The last piece of its document; the end marker follows it."""
    mark: dict[str, Any]
    """Plain JSON that `Source.read` takes to begin at this piece again, without reading what lies before."""


class Size(NamedTuple):
    """How much text an epoch of a source has. A source that knows it has it as the attribute `size`."""

    amount: int
    unit: Literal["bytes", "documents", "tokens"]
    """Bytes of text, in UTF-8."""


class Source(Protocol):
    """Documents of text in an order that depends on the epoch alone.

    What else decides which rows are no documents may be the attribute `limits` (plain JSON).
    """

    label: str
    """How error messages name it."""
    identity: dict[str, Any]
    """Plain JSON, small; equal only if the documents and their order are equal."""

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Piece]:
        """The epoch's pieces, from a mark on, or from the start.

        Raises:
            TitanError: something cannot be read, or is not text.
        """
        ...


def document_order(seed: int, epoch: int, count: int, *, shuffle: bool) -> np.ndarray:
    """The order of `count` documents, int64 [count].

    Drawn by RandomState, whose streams numpy has promised never to change (NEP 19), so that a run can be
    resumed under another version of it.
    """
    if not shuffle:
        return np.arange(count)
    words = [part & 0xFFFFFFFF for part in (seed, seed >> 32, epoch)]
    return np.random.RandomState(words).permutation(count)
