"""What a source of documents is, and how their order is drawn.

Everything between documents and batches (tokenising, packing, dealing rows to ranks, positions) is the same
for all datasets and lives in `stream.py` and `packing.py`; a source only reads text from any place in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
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
    """Documents of text in an order that depends on the epoch alone."""

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


class ByNumber:
    """Documents whose numbers are known from the start, all of them good, in an order of single ones: what
    `titancli.data.indexed_text.IndexedSource` has besides `texts`."""

    limits: Mapping[str, Any] = MappingProxyType({})
    count: int
    _seed: int
    _shuffle: bool

    def index(self) -> None:
        """There is nothing to be found."""

    def count_bad(self, bad: int) -> None:
        """There are none."""

    def order(self, epoch: int) -> np.ndarray:
        """Return the documents in the order of an epoch, int64 [count]."""
        return document_order(self._seed, epoch, self.count, shuffle=self._shuffle)

    def mark(self, epoch: int, place: int) -> dict[str, Any]:
        """Return the mark of the document at a place of the order."""
        return {"document": place}

    def place(self, epoch: int, mark: Mapping[str, Any]) -> int:
        """Return the place in the order that a mark leads to."""
        return int(mark["document"])


def document_order(seed: int, epoch: int, count: int, *, shuffle: bool) -> np.ndarray:
    """The order of `count` documents, int64 [count].

    Drawn by RandomState, whose streams numpy has promised never to change (NEP 19), so that a run can be
    resumed under another version of it.
    """
    if not shuffle:
        return np.arange(count)
    words = [part & 0xFFFFFFFF for part in (seed, seed >> 32, epoch)]
    return np.random.RandomState(words).permutation(count)
