"""Rows cut from a stream of tokens and dealt to data-parallel ranks: the dataset that most configs build.

Row r covers tokens r*S to (r+1)*S: S inputs, and as targets the S tokens that follow them. So two consecutive
rows share one token, as a target of the first and an input of the second, and every token is predicted
exactly once. Global micro-batch k consists of rows k*D*B to (k+1)*D*B (D ranks, B rows each), and rank d
takes the d-th B of them. The position between two micro-batches is a position in the stream, whatever D and B
are, so a run can continue with other values of them.

Every rank reads and tokenizes the whole stream and keeps its own rows: the price of a position that is exact
and independent of the ranks. A tokenizer handles half a million tokens per CPU-second and more, so data is
the bottleneck only if all ranks together train faster than one core tokenizes; then tokenize in advance, or
once (`titancli.data.token_cache`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash

from titancli.data.source import Piece, Size, Source
from titancli.data.stream import Frame, Position, TokenStream
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.fingerprint import Contents
from titancli.protocols import Tokenizer
from titancli.protocols.batch import IGNORE, Batch

STATE_VERSION = 1
SAMPLE = 1 << 18
"""Characters from which the number of tokens in an epoch is estimated."""


class PackedDataset:
    """Batches of packed rows from a source of documents: the `Dataset` of `titancli.protocols`.

    Batches have `tokens`, `targets` and `positions` [rows, seq_len]. With `document_mask` they also have
    `document_ids`, and positions count from the beginning of the document or, if a document is cut, of the
    row. Without `repeat` the last batch is padded with rows without targets, and every rank gets the same
    number of batches.
    """

    def __init__(
        self,
        source: Source,
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        rows: int,
        dp_rank: int,
        dp_size: int,
        repeat: bool,
        document_mask: bool,
        frame: Frame | None = None,
    ) -> None:
        """Create the dataset; `frame` defaults to the special tokens that the tokenizer adds, and the end
        marker."""
        self._source = source
        self._tokenizer = tokenizer
        self._frame = frame or Frame.of(tokenizer)
        self._seq_len = seq_len
        self._rows = rows
        self._before = dp_rank * rows * seq_len
        self._after = (dp_size - dp_rank - 1) * rows * seq_len
        self._epochs = math.inf if repeat else 1
        self.pads = False
        """Whether text shorter than one row is padded to a row; for evaluation."""
        self._document_mask = document_mask
        names = {"tokenizer": tokenizer_identity(tokenizer), **self._frame.identity}
        self._identity = {**source.identity, **names}
        self._consumed = 0
        self._stream = self._open(Position())
        self._row_positions = torch.arange(seq_len).repeat(rows, 1)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the current position on.

        Raises:
            RecipeError: without `repeat` and `pads`, there is less text than one row.
            EnvironmentProblem: the data cannot be read, or contain no text.
        """
        available = self._stream.available(self._seq_len + 1)
        if self._consumed == 0 and available <= self._seq_len and not self.pads:
            raise RecipeError(
                f"{self._source.label} has {available} tokens in total, but one row of training.seq_len "
                f"= {self._seq_len} needs {self._seq_len + 1}",
                hint="use a smaller training.seq_len, more text, or dataset.repeat = true",
            )
        while self._stream.available(2) == 2:
            yield self._next()

    def _next(self) -> Batch:
        count = self._rows * self._seq_len
        self._consumed += self._stream.skip(self._before)
        tokens, begins = self._stream.read(count)
        self._consumed += min(count, len(tokens))
        self._consumed += self._stream.skip(self._after)
        return self._batch(tokens, begins)

    def skip(self, rows: int) -> int:
        """Skip this many global rows without making them; return how many were skipped."""
        for skipped in range(rows):
            if self._stream.available(2) < 2:
                return skipped
            self._consumed += self._stream.skip(self._seq_len)
        return rows

    def rows_left(self, epochs: int) -> int:
        """Return the rows from the position to the end of the first `epochs` epochs. Without files of tokens,
        this tokenizes an epoch of the text.

        Raises:
            EnvironmentProblem: the data cannot be read, or contain no text.
        """
        return -(-(epochs * self._tokens_of_epoch() - self._consumed - 1) // self._seq_len)

    def _tokens_of_epoch(self) -> int:
        return TokenStream(self._source, self._tokenizer, self._frame, epochs=1, at=Position()).skip(
            sys.maxsize
        )

    def end_after(self, epochs: int) -> None:
        """End after this many epochs; less text than one row is padded to a row."""
        self._epochs, self.pads = epochs, True
        self._stream = self._open(self._stream.position)

    def _batch(self, tokens: np.ndarray, begins: np.ndarray) -> Batch:
        shape = (self._rows, self._seq_len)
        count = self._rows * self._seq_len
        inputs = np.full(count + 1, self._tokenizer.eos_id, np.int64)
        inputs[: len(tokens)] = tokens
        targets = inputs[1:].copy()
        targets[max(0, len(tokens) - 1) :] = IGNORE
        tensors = {
            "tokens": torch.from_numpy(inputs[:-1].reshape(shape)),
            "targets": torch.from_numpy(targets.reshape(shape)),
            "positions": self._row_positions,
        }
        if self._document_mask:
            flags = np.zeros(count, bool)
            flags[: len(begins)] = begins[:count]
            tensors |= document_tensors(flags.reshape(shape))
        return Batch(tensors)

    def _open(self, at: Position) -> TokenStream:
        return TokenStream(self._source, self._tokenizer, self._frame, epochs=self._epochs, at=at)

    def epoch_tokens(self) -> tuple[int, bool] | None:
        """Return the number of tokens in an epoch, and whether it was counted rather than estimated from a
        sample; None for a source that does not know its size. Reads little, and does not move the
        position."""
        size: Size | None = getattr(self._source, "size", None)
        if size is None:
            return None
        pieces: list[Piece] = []
        characters = 0
        for piece in self._source.read(0, None):
            if characters > SAMPLE:
                break
            pieces.append(piece)
            characters += len(piece.text)
        else:
            return self._count(pieces), True
        ended = sum(piece.ends for piece in pieces)
        seen = ended if size.unit == "documents" else sum(len(piece.text.encode()) for piece in pieces)
        return round(self._count(pieces) * size.amount / max(seen, 1)), False

    def _count(self, pieces: list[Piece]) -> int:
        """Return the number of tokens, including the special tokens of documents that have any."""
        total, document = 0, 0
        for piece, ids in zip(pieces, self._tokenizer.encode_batch([p.text for p in pieces]), strict=True):
            document += len(ids)
            added = (self._frame.bos is not None) + (self._frame.eos is not None)
            total += len(ids) + added * (piece.ends and document > 0)
            document = 0 if piece.ends else document
        return total

    def text_bytes(self) -> int | None:
        """Return the length of all text in UTF-8, reading it once; None if it is unknown."""
        return sum(len(piece.text.encode()) for piece in self._source.read(0, None))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, the same on every rank.

        `epoch` counts from 0; `tokens` is the number consumed since the start; `data` is the identity of the
        data.
        """
        epoch, mark, offset = self._stream.position
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "mark": mark,
            "offset": offset,
            "tokens": self._consumed,
            "data": self._identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, with any number of ranks and rows.

        Raises:
            EnvironmentProblem: the state was saved with other data, or does not belong to this dataset.
        """
        refuse_other_data(state, self._identity, self._source.label, "epoch", "mark", "offset", "tokens")
        self._consumed = state["tokens"]
        self._stream = self._open(Position(state["epoch"], state["mark"], state["offset"]))


def document_tensors(begins: np.ndarray) -> dict[str, torch.Tensor]:
    """Return `document_ids` (from 0 in each row) and `positions`, given which tokens begin a document.

    Args:
        begins: bool [rows, seq_len]; the first of each row becomes true.
    """
    rows, size = begins.shape
    begins[:, 0] = True
    starts = begins.reshape(-1).nonzero()[0]
    lengths = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    lengths[-1] = rows * size - starts[-1]
    numbers = np.arange(len(starts), dtype=np.int32)
    numbers -= numbers[starts.searchsorted(starts - starts % size)]  # within the row
    positions = starts.repeat(lengths)
    np.subtract(_places(rows * size), positions, out=positions)
    ids = numbers.repeat(lengths).reshape(rows, size)
    return {
        "document_ids": torch.from_numpy(ids),
        "positions": torch.from_numpy(positions.reshape(rows, size)),
    }


@lru_cache(maxsize=4)
def _places(count: int) -> np.ndarray:
    return np.arange(count)


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """Return a tokenizer's identity: its own `fingerprint`, or its class, size, end marker and files."""
    if tokenizer.fingerprint is not None:
        return str(tokenizer.fingerprint)
    digest = xxhash.xxh3_128()
    for name, path in sorted(tokenizer.files.items()):
        with open(path, "rb") as file:
            digest.update(f"{name}\0".encode() + file.read())
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    return f"{kind}:{tokenizer.vocab_size}:{tokenizer.eos_id}:{digest.hexdigest()}"


def refuse_other_data(state: Mapping[str, Any], now: Mapping[str, Any], label: str, *keys: str) -> None:
    """Check that a position belongs to the current data.

    Args:
        state: a position: `version`, `data` (the identity of its data) and these keys.

    Raises:
        EnvironmentProblem: the position belongs to another kind of dataset, or `data` differs from `now`.
    """
    saved = state.get("data")
    whole = state.get("version") == STATE_VERSION and all(key in state for key in keys)
    if not whole or not isinstance(saved, Mapping):
        raise EnvironmentProblem(
            f"the position in the data stored in the checkpoint does not belong to {label}",
            hint="resume with the original loop, its task and the original dataset of the run",
        )
    every = (*now, *(name for name in saved if name not in now))
    names = [name for name in every if saved.get(name) not in (now.get(name), _before(now.get(name)))]
    if names:
        said = ", ".join(f"{name} was {saved.get(name)} and is {now.get(name)}" for name in names)
        raise EnvironmentProblem(
            f"{label} is not the data that the checkpoint was trained on: {said}",
            hint="resume with the original data, tokenizer and training.seed, or start a new run with "
            "the checkpoint as its `weights`",
        )


def _before(value: Any) -> Any:
    """Return the identity that positions saved before large corpora were hashed completely have in its
    place."""
    return value.ends if isinstance(value, Contents) else value
