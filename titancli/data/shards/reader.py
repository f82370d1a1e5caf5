"""Reads tokens and documents at any position of many files, with little memory.

Files are read, not mapped: touching a mapping of a truncated file or a failing disk kills the process without
a message.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from titancli.data.shards import END_BYTES, Index
from titancli.data.unchanged import Stamp, require_unchanged
from titancli.errors import EnvironmentProblem

OPEN_FILES = 64
SAMPLED_FILES, SAMPLED_TOKENS = 64, 8192
"""Samples of files whose format does not state their highest id."""


class Part(NamedTuple):
    """A file of tokens."""

    path: str
    tokens: int
    first_byte: int = 0
    """Byte at which its tokens begin."""


class OpenFiles:
    """A bounded set of files open for reading: the most recently used."""

    def __init__(self, known: Mapping[str, Stamp] = MappingProxyType({})) -> None:
        """Create the set; `known` has the stamps of identified files, which must not change."""
        self._open: OrderedDict[str, io.FileIO] = OrderedDict()
        self.known = dict(known)

    def read(self, path: str, buffer: Any, byte: int) -> None:
        """Fill a buffer from a byte of a file on.

        Raises:
            EnvironmentProblem: the file cannot be read, or is too short.
        """
        view = memoryview(buffer).cast("B")
        self.ready(path, byte, len(view))
        try:
            descriptor = self.descriptor(path)
            while len(view):
                if not (count := os.preadv(descriptor, [view], byte)):
                    raise EnvironmentProblem(
                        f"{path} ends at byte {os.fstat(descriptor).st_size:,}, in the middle of the data: "
                        "it was truncated",
                        hint="restore the file, or tokenize the data again",
                    )
                view, byte = view[count:], byte + count
            self.require_unchanged(path, descriptor)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot read {path} at byte {byte:,}: {error.strerror or error}", hint="make it readable"
            ) from error

    def require_unchanged(self, path: str, descriptor: int) -> None:
        """Check that an open file has not changed.

        Raises:
            EnvironmentProblem: it has.
        """
        if (then := self.known.get(path)) is not None:
            require_unchanged(path, then, descriptor)

    def ready(self, path: str, byte: int, size: int) -> None:
        """Ensure that `size` bytes are in the file; a subclass fetches them."""

    def descriptor(self, path: str) -> int:
        """Return the file's descriptor, opening it if needed.

        Raises:
            OSError: the file cannot be opened.
        """
        if (found := self._open.get(path)) is not None:
            self._open.move_to_end(path)
            return found.fileno()
        self._open[path] = opened = io.FileIO(path)
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return opened.fileno()


class TokenFiles:
    """The tokens of several files, one after another."""

    def __init__(
        self,
        parts: Sequence[Part],
        dtype: str,
        vocab_size: int | None = None,
        files: OpenFiles | None = None,
    ) -> None:
        """Create the reader; ids of `vocab_size` or more are errors."""
        self._parts, self._vocab_size = parts, vocab_size
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._starts = np.cumsum([0, *(part.tokens for part in parts)])
        self._files = files or OpenFiles()

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, into: np.ndarray) -> None:
        """Fill an array [n] of this type with the tokens `start` to `start + n`, which must exist.

        Raises:
            EnvironmentProblem: a file cannot be read or was truncated, or an id is outside the vocabulary.
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

    def check_ends(self) -> None:
        """Read both ends of some files, where a wrong type or tokenizer usually shows.

        Raises:
            EnvironmentProblem: as for `read`.
        """
        for number in np.unique(np.linspace(0, len(self._parts) - 1, SAMPLED_FILES, dtype=np.int64)):
            begin, end = (int(at) for at in self._starts[number : number + 2])
            sample = np.empty(min(SAMPLED_TOKENS, end - begin), self.dtype)
            if len(sample):
                self.read(begin, sample)
                self.read(end - len(sample), sample)

    def gather(self, starts: np.ndarray, sizes: np.ndarray, into: np.ndarray) -> None:
        """Fill an array with consecutive pieces: `sizes` tokens from `starts` on; see `read`.

        Args:
            starts, sizes: int64 of one shape [pieces].
        """
        numbers = (
            np.searchsorted(self._starts[:-1], starts, side="right") - 1
        )  # an empty piece may be past the end
        within = starts - self._starts[numbers]
        whole = starts + sizes <= self._starts[numbers + 1]
        width, view, at = self.dtype.itemsize, into.data.cast("B"), 0
        rows = zip(numbers.tolist(), within.tolist(), sizes.tolist(), whole.tolist(), strict=True)
        for piece, (number, first, size, fits) in enumerate(rows):
            part, end = self._parts[number], at + size * width
            if fits:  # fast path; on failure `read` reports the reason
                self._files.ready(part.path, part.first_byte + first * width, end - at)
                try:
                    descriptor = self._files.descriptor(part.path)
                    fits = os.preadv(descriptor, [view[at:end]], part.first_byte + first * width) == end - at
                    self._files.require_unchanged(part.path, descriptor)
                except OSError:
                    fits = False
            if not fits:
                self.read(int(starts[piece]), into[at // width : end // width])
            at = end
        if self._wrong(into):
            for piece, end in enumerate(np.cumsum(sizes).tolist()):
                self.read(int(starts[piece]), into[end - int(sizes[piece]) : end])

    def _wrong(self, ids: np.ndarray) -> bool:
        """Return whether an id is outside the vocabulary."""
        if self._vocab_size is None or not len(ids):
            return False
        return bool(ids.max() >= self._vocab_size or (self.dtype.kind == "i" and ids.min() < 0))

    def _check(self, path: str, ids: np.ndarray, byte: int) -> None:
        if not self._wrong(ids):
            return
        at = int(np.flatnonzero((ids >= self._vocab_size) | (ids < 0))[0])
        raise EnvironmentProblem(
            f"{path}: the token at byte {byte + at * self.dtype.itemsize:,} is {int(ids[at])}, but the "
            f"vocabulary has {self._vocab_size:,} ids",
            hint="use the tokenizer that the data were tokenized with, and the right format and dtype",
        )


class DocumentEnds:
    """The bounds of documents in the tokens of shards, read from their `.idx` files."""

    def __init__(self, indexes: Sequence[Index], files: OpenFiles | None = None) -> None:
        counts = [(shard.documents, shard.tokens) for index in indexes for shard in index.shards]
        self._firsts = np.cumsum([0, *(documents for documents, _ in counts)])
        self._tokens = np.cumsum([0, *(tokens for _, tokens in counts)])
        self._paths = [str(index.files(shard)[1][0]) for index in indexes for shard in index.shards]
        self._files = files or OpenFiles()

    @property
    def documents(self) -> int:
        return int(self._firsts[-1])

    def bounds(self, documents: np.ndarray) -> np.ndarray:
        """Return the first token of each of some documents, and the one after its last, int64 [n, 2]."""
        shards = np.searchsorted(self._firsts, documents, side="right") - 1
        found = np.zeros((len(documents), 2), "<i8")
        places = list(zip(shards.tolist(), (documents - self._firsts[shards]).tolist(), strict=True))
        for both, (shard, at) in zip(found, places, strict=True):
            self._files.read(self._paths[shard], both if at else both[1:], max(0, at - 1) * END_BYTES)
        sizes = self._tokens[shards + 1] - self._tokens[shards]
        wrong = (found[:, 0] < 0) | (found[:, 0] > found[:, 1]) | (found[:, 1] > sizes)
        if wrong.any():
            shard, at = places[int(np.flatnonzero(wrong)[0])]
            self._damaged(shard, at)
        return found + self._tokens[shards, None]

    def of_shard(self, number: int) -> np.ndarray:
        """Return the end of each document of a shard, in tokens of the shard, int64 [documents]."""
        ends = np.empty(self._firsts[number + 1] - self._firsts[number], "<i8")
        self._files.read(self._paths[number], ends, 0)
        wrong = np.diff(ends, prepend=0, append=self._tokens[number + 1] - self._tokens[number]) < 0
        if wrong.any():
            self._damaged(number, min(int(np.flatnonzero(wrong)[0]), len(ends) - 1))
        return ends

    def _damaged(self, shard: int, document: int) -> NoReturn:
        raise EnvironmentProblem(
            f"{self._paths[shard]} is damaged at byte {document * END_BYTES:,}: the end of a document lies "
            "before its beginning, or behind the shard",
            hint="restore the file, or tokenize the data again",
        )


def parts_of(indexes: Sequence[Index]) -> list[Part]:
    """Return the token files of shards."""
    return [Part(str(index.files(shard)[0][0]), shard.tokens) for index in indexes for shard in index.shards]


def document_of(index: Index, number: int) -> tuple[list[int], str]:
    """Return the ids of a document with its end marker, and the name of its shard.

    Raises:
        EnvironmentProblem: a file cannot be read.
    """
    [(start, end)] = DocumentEnds([index]).bounds(np.array([number])).tolist()
    ids = np.empty(end - start, np.dtype(index.dtype).newbyteorder("<"))
    TokenFiles(parts_of([index]), index.dtype).read(start, ids)
    firsts = np.cumsum([0, *(shard.documents for shard in index.shards)])
    return ids.tolist(), index.shards[int(np.searchsorted(firsts, number, side="right")) - 1].name


def lengths(index: Index) -> dict[str, int]:
    """Return a histogram of document lengths in tokens, by powers of two: `"64-127"` to a count.

    Raises:
        EnvironmentProblem: a file cannot be read.
    """
    ends, counts = DocumentEnds([index]), np.zeros(64, np.int64)
    for number in range(len(index.shards)):
        sizes = np.diff(ends.of_shard(number), prepend=0)
        counts += np.bincount(np.log2(np.maximum(sizes, 1)).astype(np.int64), minlength=64)
    found = np.flatnonzero(counts)
    return {
        f"{1 << power}-{(2 << power) - 1}": int(counts[power]) for power in range(found[0], found[-1] + 1)
    }
