"""The interface of a source of documents, and the order of documents.

Everything between documents and batches (tokenizing, packing, dealing rows to ranks, positions) is shared by
all datasets, in `stream.py` and `packing.py`; a source only reads text from any position on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np


class Piece(NamedTuple):
    """A document, or a piece of a long one, that is tokenized by itself."""

    text: str
    begins: bool
    """Whether it is the first piece of its document."""
    ends: bool
    """Whether it is the last piece of its document; the end marker follows it."""
    mark: dict[str, Any]
    """Plain JSON with which `Source.read` resumes at this piece, without reading what comes before."""


class Size(NamedTuple):
    """Amount of text in an epoch of a source. A source that knows it has the attribute `size`."""

    amount: int
    unit: Literal["bytes", "documents", "tokens"]
    """`"bytes"` are bytes of text in UTF-8."""


class Source(Protocol):
    """Documents of text in an order that depends on the epoch alone.

    A source may have an attribute `limits` (plain JSON): settings that decide which rows are bad.
    """

    label: str
    """Name in error messages."""
    identity: dict[str, Any]
    """Small plain JSON; equal only if the documents and their order are equal."""

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Piece]:
        """Yield the epoch's pieces, from a mark or from the start on.

        Raises:
            TitanError: data cannot be read, or are not text.
        """
        ...


def document_order(seed: int, epoch: int, count: int, *, shuffle: bool) -> np.ndarray:
    """Return the order of `count` documents, int64 [count].

    Drawn by RandomState, whose streams NumPy guarantees never to change (NEP 19), so that a run can be
    resumed with another version of it.
    """
    if not shuffle:
        return np.arange(count)
    words = [part & 0xFFFFFFFF for part in (seed, seed >> 32, epoch)]
    return np.random.RandomState(words).permutation(count)
