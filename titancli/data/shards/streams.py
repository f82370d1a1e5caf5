"""The endless stream of tokens in files; skipped tokens are not read. See `titancli.data.stream`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from titancli.data.shards.reader import TokenFiles
from titancli.data.stream import Position

BLOCK = 256
"""Documents whose bounds are looked up at once."""


class Documents(Protocol):
    @property
    def documents(self) -> int: ...

    def bounds(self, documents: np.ndarray) -> np.ndarray: ...


class ListedStream:
    """All tokens in file order; a position is a token's index in the epoch."""

    def __init__(self, files: TokenFiles, at: Position, *, epochs: float, eos_id: int | None) -> None:
        """Create the stream of the first `epochs` epochs; `eos_id` ends a document, or is None if the starts
        of documents are not needed."""
        self._files, self._epochs, self._eos_id = files, epochs, eos_id
        self._epoch, self._at = at.epoch, at.offset

    @property
    def position(self) -> Position:
        return Position(self._epoch, None, self._at)

    def available(self, count: int) -> int:
        return int(min(count, (self._epochs - self._epoch) * self._files.tokens - self._at))

    def read(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Advance by `count` tokens; return them and the one after them, and which begin a document."""
        tokens = np.empty(self.available(count + 1), self._files.dtype)
        filled, at = 0, self._at
        while filled < len(tokens):
            part = tokens[filled : filled + self._files.tokens - at]
            self._files.read(at, part)
            filled, at = filled + len(part), 0
        self.skip(count)
        return tokens, begins(tokens, self._eos_id)

    def skip(self, count: int) -> int:
        skipped = self.available(count)
        more, self._at = divmod(self._at + skipped, self._files.tokens)
        self._epoch += more
        return skipped


class DocumentStream:
    """Whole documents in any order; a position is a document's position in the epoch, and a token in it."""

    def __init__(
        self,
        files: TokenFiles,
        documents: Documents,
        at: Position,
        *,
        epochs: float,
        order: Callable[[int, np.ndarray], np.ndarray],
        eos_id: int | None = None,
    ) -> None:
        """Create the stream of the first `epochs` epochs; `order` maps an epoch and positions in it to
        documents."""
        self._files, self._documents, self._epochs, self._eos_id = files, documents, epochs, eos_id
        self._order, self._epoch, self._offset = order, at.epoch, at.offset
        self._place: int = at.mark["document"] if at.mark else 0
        self._block: tuple[tuple[int, int], np.ndarray, np.ndarray] | None = None
        self._turn()

    @property
    def position(self) -> Position:
        mark: dict[str, Any] = {"document": self._place}
        return Position(self._epoch, mark, self._offset)

    def available(self, count: int) -> int:
        if self._epochs == math.inf:
            return count
        epoch, place, offset, found = self._epoch, self._place, self._offset, 0
        while found < count and epoch < self._epochs:
            if place == self._documents.documents:
                epoch, place = epoch + 1, 0
                continue
            _, lengths, within = self._bounds(epoch, place)
            found += int(lengths[within:].sum()) - offset
            place, offset = place - within + len(lengths), 0
        return min(count, found)

    def _turn(self) -> None:
        """Go from the end of an epoch to the start of the next, unless it is the last."""
        if self._place == self._documents.documents and self._epoch + 1 < self._epochs:
            self._epoch, self._place = self._epoch + 1, 0

    def read(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Advance by `count` tokens; return them and the one after them, and which begin a document."""
        tokens = np.empty(self.available(count + 1), self._files.dtype)
        self._walk(len(tokens), tokens)
        if len(tokens) > count:
            self._back()
        self._settle()
        return tokens, begins(tokens, self._eos_id)

    def skip(self, count: int) -> int:
        skipped = self.available(count)
        self._walk(skipped, None)
        self._settle()
        return skipped

    def _settle(self) -> None:
        """Skip documents without tokens: a position is the next token's, however it was reached."""
        count = self._documents.documents
        while self._offset == 0 and self._place < count:
            _, lengths, within = self._bounds(self._epoch, self._place)
            there = np.flatnonzero(lengths[within:])
            if len(there):
                self._place += int(there[0])
                return
            self._place += len(lengths) - within
            self._turn()

    def _back(self) -> None:
        """Go back one token."""
        while self._offset == 0:
            if self._place == 0:
                self._epoch, self._place = self._epoch - 1, self._documents.documents
            self._place -= 1
            _, lengths, within = self._bounds(self._epoch, self._place)
            self._offset = int(lengths[within])
        self._offset -= 1

    def _walk(self, count: int, into: np.ndarray | None) -> None:
        """Advance by `count` tokens, which must exist; with `into`, fill it with them."""
        filled = 0
        while filled < count:
            starts, lengths, within = self._bounds(self._epoch, self._place)
            ends = np.cumsum(lengths[within:]) - self._offset
            last = int(np.searchsorted(ends, count - filled, side="left"))
            whole = min(last, len(ends) - 1)
            if into is not None:
                firsts, sizes = (part[within : within + whole + 1].copy() for part in (starts, lengths))
                firsts[0] += self._offset
                sizes[0] -= self._offset
                sizes[-1] -= max(0, int(ends[whole]) - (count - filled))
                self._files.gather(firsts, sizes, into[filled : filled + int(sizes.sum())])
            if last < len(ends) and ends[last] > count - filled:  # it ends within a document
                before = int(ends[last - 1]) if last else -self._offset
                self._place, self._offset = self._place + last, count - filled - before
                return
            filled += int(ends[whole])
            self._place, self._offset = self._place + whole + 1, 0
            self._turn()

    def _bounds(self, epoch: int, place: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the first tokens and lengths of a block of documents, and the index of a position in it."""
        number, within = divmod(place, BLOCK)
        if self._block is None or self._block[0] != (epoch, number):
            count = self._documents.documents
            places = np.arange(number * BLOCK, min(count, (number + 1) * BLOCK))
            found = self._documents.bounds(self._order(epoch, places))
            self._block = ((epoch, number), found[:, 0], found[:, 1] - found[:, 0])
        return self._block[1], self._block[2], within


def begins(tokens: np.ndarray, eos_id: int | None) -> np.ndarray:
    """Return which tokens follow an end marker, bool; empty if `eos_id` is None."""
    found = np.zeros(len(tokens) if eos_id is not None else 0, bool)
    if eos_id is not None:
        found[1:] = tokens[:-1] == eos_id
    return found
