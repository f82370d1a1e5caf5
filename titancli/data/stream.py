"""The endless stream of a source's tokens, readable from any position.

Documents are tokenized in groups and followed by the end marker. Only the documents around the position are
in memory, and seeking reads nothing before the position's piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from titancli.data.source import Piece, Source
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols import Tokenizer

GROUP_PIECES = 64
GROUP_CHARACTERS = 1 << 20
"""Limits on the pieces tokenized together: enough to keep the tokenizer's threads busy."""


class Frame(NamedTuple):
    """The special tokens around each document."""

    bos: int | None
    """First token; None: there is none."""
    eos: int | None
    """End marker; None: there is none."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, add_bos: bool | None = None, add_eos: bool = True) -> Frame:
        """Return the special tokens of a dataset.

        Args:
            add_bos: begin documents with BOS; None: if the tokenizer itself does that to a text.

        Raises:
            RecipeError: BOS is requested, but the tokenizer has none.
        """
        if add_bos and tokenizer.bos_id is None:
            raise RecipeError("dataset.add_bos: the tokenizer has no BOS token", hint="remove it")
        adds = tokenizer.adds_bos if add_bos is None else add_bos
        return cls(tokenizer.bos_id if adds else None, tokenizer.eos_id if add_eos else None)

    def around(self, ids: np.ndarray, *, begins: bool, ends: bool) -> np.ndarray:
        """Return the ids of a piece with what is put before and after it, int32 if anything is."""
        first = [self.bos] if begins and self.bos is not None else []
        last = [self.eos] if ends and self.eos is not None else []
        if not first and not last:
            return ids
        tokens = np.empty(len(first) + len(ids) + len(last), np.int32)
        tokens[: len(first)] = first
        tokens[len(first) : len(first) + len(ids)] = ids
        tokens[len(first) + len(ids) :] = last
        return tokens

    @property
    def identity(self) -> dict[str, Any]:
        """Return the part of a dataset's identity for special tokens; empty for the end marker alone."""
        return {
            **({} if self.bos is None else {"bos": self.bos}),
            **({"eos": False} if self.eos is None else {}),
        }

    def __str__(self) -> str:
        begin = "without BOS" if self.bos is None else f"with BOS ({self.bos})"
        end = "no end marker" if self.eos is None else f"the end marker ({self.eos})"
        return f"documents begin {begin} and have {end} after them"


class Position(NamedTuple):
    """Position of the next token to be read."""

    epoch: int = 0
    mark: dict[str, Any] | None = None
    """Piece that it is in; None: the first of the epoch."""
    offset: int = 0
    """Tokens of that piece before it."""


class _Chunk(NamedTuple):
    """A tokenized piece with at least one token."""

    tokens: np.ndarray
    """[n], of some integer type."""
    begins: bool
    epoch: int
    mark: dict[str, Any]


class TokenStream:
    """Tokens of a source from a position on, to the end of the first `epochs` epochs.

    A document without tokens is skipped, including its end marker.
    """

    def __init__(
        self, source: Source, tokenizer: Tokenizer, frame: Frame, *, epochs: float, at: Position
    ) -> None:
        self._source = source
        self._frame = frame
        self._epochs = epochs
        self._tokenizer = tokenizer
        self._start = at
        self._incoming = self._tokenise(at.epoch, at.mark)
        self._chunks: deque[_Chunk] = deque()  # the head is kept, even when used up, until another comes
        self._offset = at.offset
        self._ready = -at.offset

    @property
    def position(self) -> Position:
        """Return the next token's position; the same whether the tokens before it were read or skipped."""
        if not self._chunks:
            return self._start
        head = self._chunks[0]
        return Position(head.epoch, head.mark, self._offset)

    def available(self, count: int) -> int:
        """Return how many of the next `count` tokens exist: fewer only at the end of the data."""
        while self._ready < count and (chunk := next(self._incoming, None)) is not None:
            self._chunks.append(chunk)
            self._ready += len(chunk.tokens)
        return max(0, min(count, self._ready))

    def read(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Advance by `count` tokens; return them *and the one after them*, which stays unread.

        Returns:
            The tokens, int32 [n], and which of them begin a document, bool [n]; n is `count + 1`, or less at
                the end of the data.
        """
        size = self.available(count + 1)
        tokens, begins = np.empty(size, np.int32), np.zeros(size, bool)
        filled, offset = 0, self._offset
        for chunk in self._chunks:
            part = chunk.tokens[offset : offset + size - filled]
            if offset == 0 and len(part):
                begins[filled] = chunk.begins
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            if filled == size:
                break
            offset = max(0, offset - len(chunk.tokens))
        self._advance(min(count, size))
        return tokens, begins

    def skip(self, count: int) -> int:
        """Skip `count` tokens; return how many were skipped."""
        skipped = 0
        while skipped < count and self.available(1):
            step = min(count - skipped, self._ready)
            self._advance(step)
            skipped += step
        self.available(1)
        self._advance(0)
        return skipped

    def _advance(self, count: int) -> None:
        self._offset += count
        self._ready -= count
        while len(self._chunks) > 1 and self._offset >= len(self._chunks[0].tokens):
            self._offset -= len(self._chunks.popleft().tokens)

    def _tokenise(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[_Chunk]:
        while True:
            whole, nothing = mark is None, True
            for piece, tokens, begins in framed(self._source.read(epoch, mark), self._tokenizer, self._frame):
                yield _Chunk(tokens, begins, epoch, piece.mark)
                nothing = False
            if whole and nothing:
                raise EnvironmentProblem(
                    f"{self._source.label} contains no text: all documents are empty",
                    hint="use a dataset with text",
                )
            if epoch + 1 >= self._epochs:
                return
            epoch, mark = epoch + 1, None


def framed(
    pieces: Iterator[Piece], tokenizer: Tokenizer, frame: Frame
) -> Iterator[tuple[Piece, np.ndarray, bool]]:
    """Yield the pieces that have tokens, with the tokens in the document's frame, of some integer type [n],
    and whether they are the document's first."""
    unbegun = False  # a document has begun, but had no token yet
    for group in groups(pieces):
        for piece, ids in zip(group, encode(tokenizer, [p.text for p in group]), strict=True):
            unbegun = unbegun or piece.begins
            ended = piece.ends and (len(ids) > 0 or not unbegun)
            begun = unbegun and len(ids) > 0
            tokens = frame.around(ids, begins=begun, ends=ended)
            if len(tokens):
                yield piece, tokens, unbegun
                unbegun = False


def groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield groups of pieces that are tokenized together."""
    group: list[Piece] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if len(group) >= GROUP_PIECES or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return the ids of each text as integer arrays, using `tokenizer.encode_arrays` if it exists."""
    arrays = tokenizer.encode_arrays(texts)
    if arrays is not None:
        return arrays
    return [np.asarray(ids, np.int32) for ids in tokenizer.encode_batch(texts)]
