"""Reads tokens and documents from any place of many files, with little memory.

Files are read, not mapped: to touch a mapping of a file that was truncated, or of a disk that fails, ends the
process without a word.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from titancli.data.shards import END_BYTES, Index
from titancli.errors import EnvironmentProblem

OPEN_FILES = 64


class Part(NamedTuple):
    """A file of tokens."""

    path: str
    tokens: int
    first_byte: int = 0
    """Where its tokens begin."""


class Descriptors:
    """Open files, the last ones that were used."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, buffer: Any, byte: int) -> None:
        """Fill a buffer from a byte of a file on.

        Raises:
            EnvironmentProblem: the file cannot be read, or ends before.
        """
        view = memoryview(buffer).cast("B")
        try:
            descriptor = self._descriptor(path)
            while len(view):
                if not (count := os.preadv(descriptor, [view], byte)):
                    raise EnvironmentProblem(
                        f"{path} ends at byte {byte:,}, in the middle of the data: it was truncated",
                        hint="restore the file, or tokenize the data again",
                    )
                view, byte = view[count:], byte + count
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot read {path} at byte {byte:,}: {error.strerror or error}", hint="make it readable"
            ) from error

    def _descriptor(self, path: str) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open[path] = descriptor
        if len(self._open) > OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


class TokenFiles:
    """The tokens of files, one after another."""

    def __init__(self, parts: Sequence[Part], dtype: str, vocab_size: int | None = None) -> None:
        """`vocab_size`: an id from there on is an error."""
        self._parts, self._vocab_size = parts, vocab_size
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._starts = np.cumsum([0, *(part.tokens for part in parts)])
        self._files = Descriptors()

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, into: np.ndarray) -> None:
        """Fill an array [n] of this type with the tokens `start` to `start + n`, which must exist.

        Raises:
            EnvironmentProblem: a file cannot be read or was truncated, or an id is none of the vocabulary.
        """
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled, at = 0, start - int(self._starts[number])
        while filled < len(into):
            part = self._parts[number]
            here = into[filled : filled + part.tokens - at]
            byte = part.first_byte + at * self.dtype.itemsize
            self._files.read(part.path, here, byte)
            self._check(part.path, here, byte)
            filled, at, number = filled + len(here), 0, number + 1

    def _check(self, path: str, ids: np.ndarray, byte: int) -> None:
        if self._vocab_size is None or not len(ids):
            return
        signed = self.dtype.kind == "i"
        if ids.max() < self._vocab_size and not (signed and ids.min() < 0):
            return
        at = int(np.flatnonzero((ids >= self._vocab_size) | (ids < 0))[0])
        raise EnvironmentProblem(
            f"{path}: the token at byte {byte + at * self.dtype.itemsize:,} is {int(ids[at])}, but the "
            f"vocabulary has {self._vocab_size:,} ids",
            hint="use the tokenizer that the data were tokenized with, and the right format and dtype",
        )


class DocumentEnds:
    """Where documents begin and end in the tokens of shards, read from their `.idx` files."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._firsts = np.cumsum([0, *(shard.documents for shard in index.shards)])
        self._tokens = np.cumsum([0, *(shard.tokens for shard in index.shards)])
        self._paths = [str(index.files(shard)[1][0]) for shard in index.shards]
        self._files = Descriptors()

    @property
    def documents(self) -> int:
        return int(self._firsts[-1])

    def bounds(self, document: int) -> tuple[int, int]:
        """Return the first token of a document, and the one behind its last."""
        shard = int(np.searchsorted(self._firsts, document, side="right")) - 1
        at = document - int(self._firsts[shard])
        both = np.zeros(2, "<i8")
        self._files.read(self._paths[shard], both if at else both[1:], max(0, at - 1) * END_BYTES)
        first = int(self._tokens[shard])
        return first + int(both[0]), first + int(both[1])

    def of_shard(self, number: int) -> np.ndarray:
        """Return where each document of a shard ends, in tokens of the shard, int64 [documents]."""
        ends = np.empty(self._index.shards[number].documents, "<i8")
        self._files.read(self._paths[number], ends, 0)
        return ends


def tokens_of(index: Index, vocab_size: int | None = None) -> TokenFiles:
    """Return the tokens of shards."""
    parts = [Part(str(index.files(shard)[0][0]), shard.tokens) for shard in index.shards]
    return TokenFiles(parts, index.dtype, vocab_size)


def document_of(index: Index, number: int) -> tuple[list[int], str]:
    """Return the ids of a document with its end marker, and the name of its shard.

    Raises:
        EnvironmentProblem: a file cannot be read.
    """
    start, end = DocumentEnds(index).bounds(number)
    ids = np.empty(end - start, np.dtype(index.dtype).newbyteorder("<"))
    tokens_of(index).read(start, ids)
    firsts = np.cumsum([0, *(shard.documents for shard in index.shards)])
    return ids.tolist(), index.shards[int(np.searchsorted(firsts, number, side="right")) - 1].name


def lengths(index: Index) -> dict[str, int]:
    """Return how many documents have so many tokens, by powers of two: `"64-127"` to a count.

    Raises:
        EnvironmentProblem: a file cannot be read.
    """
    ends, counts = DocumentEnds(index), np.zeros(64, np.int64)
    for number in range(len(index.shards)):
        sizes = np.diff(ends.of_shard(number), prepend=0)
        counts += np.bincount(np.log2(np.maximum(sizes, 1)).astype(np.int64), minlength=64)
    found = np.flatnonzero(counts)
    return {
        f"{1 << power}-{(2 << power) - 1}": int(counts[power]) for power in range(found[0], found[-1] + 1)
    }
