"""Text whose documents were measured once (`length_index`): each rank tokenizes its own rows only.

The lengths say where each document lies in the stream of all tokens. So what lies before a row is counted,
not tokenized, and documents that are tokenized when they are needed take the place of token files
(`titancli.data.shards`). Rows, their order and the positions are those that there are without lengths.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from titancli.data.lengths import BAD, row_lengths
from titancli.data.packing import PackedDataset, tokenizer_identity
from titancli.data.shards.packed import Documents, ShardPackedDataset
from titancli.data.shards.streams import DocumentStream
from titancli.data.source import Source
from titancli.data.stream import Position, encode, with_end
from titancli.errors import EnvironmentProblem
from titancli.protocols import Tokenizer

KEPT_TOKENS = 1 << 21
"""Of documents that were tokenized last: one that is longer than a row is wanted again."""
TOGETHER = 64
"""Documents that are tokenized together."""


class IndexedSource(Source, Protocol):
    """Documents that can be read one by one, of rows that are counted."""

    limits: Mapping[str, Any]
    """What, besides the identity, decides which rows are no documents."""

    @property
    def count(self) -> int:
        """Rows, those included that are none."""
        ...

    def index(self) -> None:
        """Find the rows.

        Raises:
            EnvironmentProblem: they cannot be found one by one.
        """
        ...

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows in the order of an epoch, int64 [count]."""
        ...

    def mark(self, epoch: int, place: int) -> dict[str, Any]:
        """Return the mark of the row at a place of the order."""
        ...

    def place(self, epoch: int, mark: Mapping[str, Any]) -> int: ...

    def texts(self, rows: Sequence[int]) -> list[str | None]:
        """Return the documents of rows; None, and reported, for one that is none."""
        ...

    def count_bad(self, bad: int) -> None:
        """Report how many rows are none, if any."""
        ...


class TextTokens:
    """The tokens of all documents by their rows, in place of `TokenFiles` and `DocumentEnds` of shards."""

    dtype = np.dtype(np.int32)

    def __init__(self, source: IndexedSource, tokenizer: Tokenizer) -> None:
        source.index()
        self.source, self._tokenizer = source, tokenizer
        self._order: tuple[int, np.ndarray] | None = None
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self._kept_tokens = 0

    @cached_property
    def _lengths(self) -> np.ndarray:
        """Tokens of each row with its end marker, int32; BAD for one that is no document."""
        source = self.source
        known = {**source.identity, **source.limits, "tokenizer": tokenizer_identity(self._tokenizer)}
        known["order"] = "text"  # the lengths are the same in every order
        return row_lengths(known, source.count, self._measured)

    @cached_property
    def _bad(self) -> int:
        return int((self._lengths == BAD).sum())

    @cached_property
    def _starts(self) -> np.ndarray:
        starts = np.zeros(self.documents + 1, np.int64)
        np.cumsum(np.maximum(self._lengths, 0), out=starts[1:])
        if not starts[-1]:
            raise EnvironmentProblem(
                f"{self.source.label} contains no text: all documents are empty",
                hint="use a dataset with text",
            )
        return starts

    @property
    def documents(self) -> int:
        return self.source.count

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    def order(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the rows at some places of an epoch."""
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.source.order(epoch)
        return self._order[1][places]

    def bounds(self, documents: np.ndarray) -> np.ndarray:
        """Return the first token of each of some documents, and the one behind its last, int64 [n, 2]."""
        return np.stack((self._starts[documents], self._starts[documents + 1]), 1)

    def read(self, start: int, into: np.ndarray) -> None:
        """Fill an array with tokens of one document."""
        self.gather(np.array([start]), np.array([len(into)]), into)

    def gather(self, starts: np.ndarray, sizes: np.ndarray, into: np.ndarray) -> None:
        """Fill an array with pieces of documents, one behind the other: `sizes` tokens from `starts` on."""
        self.source.count_bad(self._bad)
        starts, sizes = starts[sizes > 0], sizes[sizes > 0]
        rows = np.searchsorted(self._starts, starts, side="right") - 1
        firsts, at = starts - self._starts[rows], 0
        for group in range(0, len(rows), TOGETHER):
            here = slice(group, group + TOGETHER)
            self._tokenize(rows[here].tolist())
            for row, first, size in zip(rows[here], firsts[here], sizes[here], strict=True):
                into[at : at + size] = self._kept[int(row)][first : first + size]
                at += size

    def _tokenize(self, rows: list[int]) -> None:
        """Ensure that the tokens of some documents are kept, and not many more."""
        missing = [row for row in dict.fromkeys(rows) if row not in self._kept]
        for row, tokens in zip(missing, self._made(missing), strict=True):
            if len(tokens) != self._lengths[row]:
                raise EnvironmentProblem(
                    f"{self.source.label}: row {row:,} is no longer as long as when it was measured",
                    hint="the tokenizer or the data changed without changing their names and contents: set "
                    "dataset.length_index = false",
                )
            self._kept[row] = tokens
            self._kept_tokens += len(tokens)
        for row in rows:
            self._kept.move_to_end(row)
        while self._kept_tokens > KEPT_TOKENS and len(self._kept) > len(rows):
            self._kept_tokens -= len(self._kept.popitem(last=False)[1])

    def _made(self, rows: Sequence[int]) -> list[np.ndarray]:
        """The tokens of documents, each with its end marker; nothing for a row that is none."""
        texts = self.source.texts(rows) if rows else []
        found = encode(self._tokenizer, [text or "" for text in texts]) if texts else []
        return [with_end(ids, self._tokenizer.eos_id) if len(ids) else ids for ids in found]

    def _measured(self, rows: Sequence[int]) -> list[int]:
        found: list[int] = []
        for first in range(0, len(rows), TOGETHER):
            texts = self.source.texts(rows[first : first + TOGETHER])
            ids = encode(self._tokenizer, [text or "" for text in texts])
            found += [
                BAD if text is None else len(each) + (len(each) > 0)
                for text, each in zip(texts, ids, strict=True)
            ]
        return found


class TextStream(DocumentStream):
    """The stream of `titancli.data.stream`; what is passed over is not tokenized."""

    def __init__(self, tokens: TextTokens, at: Position, *, repeat: bool) -> None:
        place = 0 if at.mark is None else tokens.source.place(at.epoch, at.mark)
        self._tokens = tokens
        super().__init__(
            cast(Any, tokens),
            tokens,
            at._replace(mark={"document": place}),
            repeat=repeat,
            order=tokens.order,
        )

    @property
    def position(self) -> Position:
        epoch, _, offset = super().position
        if self._place < self._tokens.documents:
            return Position(epoch, self._tokens.source.mark(epoch, self._place), offset)
        last, size = self._tokens.documents, 0  # the end of the data is that of their last token
        while not size:
            last -= 1
            [size] = np.diff(self._tokens.bounds(self._tokens.order(epoch, np.array([last]))))[:, 0].tolist()
        return Position(epoch, self._tokens.source.mark(epoch, last), size)

    def _begins(self, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return starts


class TextStreamDataset(PackedDataset):
    """Batches from the stream of all tokens."""

    def __init__(self, tokens: TextTokens, **options: Any) -> None:
        self._tokens = tokens
        super().__init__(tokens.source, **options)

    def _open(self, at: Position) -> Any:
        return TextStream(self._tokens, at, repeat=self._repeat)

    def epoch_tokens(self) -> tuple[int, bool]:
        return self._tokens.tokens, True


class TextPackedDataset(ShardPackedDataset):
    """Batches of rows of documents that fit together."""

    def __init__(self, tokens: TextTokens, config: Any, **options: Any) -> None:
        self._tokens = tokens
        source = tokens.source
        documents = Documents(cast(Any, tokens), cast(Any, tokens), source.identity, source.label)
        super().__init__(documents, config, **options)

    def _order(self, epoch: int, places: np.ndarray) -> np.ndarray:
        return self._tokens.order(epoch, places)

    def _mark(self, epoch: int, place: int, past: int) -> dict[str, Any]:
        return {"piece": self._tokens.source.mark(epoch, place), "past": past}

    def _at(self, epoch: int, mark: dict[str, Any]) -> tuple[int, int]:
        return self._tokens.source.place(epoch, mark["piece"]), mark["past"]
