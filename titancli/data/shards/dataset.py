"""The dataset `token_shards`: rows cut from token files, of which each rank reads only its own.

Shuffled by rows, row p covers tokens p*S to (p+1)*S of all files, and its position in the order is computed.
In the other orders the tokens form one endless stream, like that of a live tokenizer
(`titancli.data.packing`), and other ranks' parts are skipped without being read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from titancli.data import TokenShards
from titancli.data.packing import (
    STATE_VERSION,
    PackedDataset,
    document_tensors,
    refuse_other_data,
    tokenizer_identity,
)
from titancli.data.permutation import permuted
from titancli.data.shards import Index, read_index, require_sound
from titancli.data.shards.foreign import MegatronDocuments, open_foreign, paths_of
from titancli.data.shards.packed import Documents, ShardPackedDataset
from titancli.data.shards.reader import DocumentEnds, OpenFiles, TokenFiles, parts_of
from titancli.data.shards.remote import RemoteFiles
from titancli.data.shards.streams import DocumentStream, ListedStream
from titancli.data.source import Size, Source
from titancli.data.stream import Position
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols import Tokenizer
from titancli.protocols.batch import IGNORE, Batch
from titancli.recipe.find import url_of

logger = logging.getLogger(__name__)

LABEL = "dataset token_shards"
AHEAD = 1024
"""Rows whose positions are drawn at once."""


class Tokens(NamedTuple):
    """Token files that were opened and checked; they replace a source of text."""

    files: TokenFiles
    documents: DocumentEnds | MegatronDocuments | None
    identity: dict[str, Any]
    label: str = LABEL

    @property
    def size(self) -> Size:
        return Size(self.files.tokens, "tokens")


class ShardStreamDataset(PackedDataset):
    """Batches from the stream of all tokens, in file order or with shuffled documents."""

    def __init__(self, tokens: Tokens, config: TokenShards, seed: int, **runtime: Any) -> None:
        self._tokens, self._config, self._seed = tokens, config, seed
        source = cast(Source, tokens)  # everything but `read`, which only text needs
        super().__init__(source, repeat=config.repeat, document_mask=config.document_mask, **runtime)

    def _open(self, at: Position) -> Any:
        eos = self._tokenizer.eos_id if self._document_mask else None
        if self._config.shuffle == "off":
            return ListedStream(self._tokens.files, at, epochs=self._epochs, eos_id=eos)
        documents = cast(DocumentEnds | MegatronDocuments, self._tokens.documents)  # checked by `build`

        def order(epoch: int, places: np.ndarray) -> np.ndarray:
            return permuted(places, documents.documents, self._seed, epoch)

        return DocumentStream(self._tokens.files, documents, at, epochs=self._epochs, order=order, eos_id=eos)

    def _tokens_of_epoch(self) -> int:
        return self._tokens.files.tokens

    def epoch_tokens(self) -> tuple[int, bool]:
        return self._tokens.files.tokens, True

    def text_bytes(self) -> None:
        """Return None: the shards contain no text."""


class ShardRowDataset:
    """Batches of rows of `seq_len` tokens in a random order; the last one of an epoch may be padded."""

    def __init__(
        self,
        tokens: Tokens,
        config: TokenShards,
        seed: int,
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        rows: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        self._tokens, self._config, self._seed = tokens, config, seed
        self._seq_len, self._rows, self._dp_rank, self._dp_size = seq_len, rows, dp_rank, dp_size
        self._eos_id = tokenizer.eos_id
        self._identity = {**tokens.identity, "tokenizer": tokenizer_identity(tokenizer)}
        self._per_epoch = -(-(tokens.files.tokens - 1) // seq_len)
        self._end: float = math.inf if config.repeat else self._per_epoch
        """Row that is not read any more, counted over all epochs."""
        self._next_row = 0
        self._row_positions = torch.arange(seq_len).repeat(rows, 1)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the current position on.

        Raises:
            EnvironmentProblem: a file cannot be read or was truncated.
        """
        stride = self._rows * self._dp_size
        ahead = max(1, AHEAD // self._rows)
        mine = np.arange(ahead)[:, None] * stride + self._dp_rank * self._rows + np.arange(self._rows)
        first, drawn = 0, mine[:0]
        while self._next_row < self._end:
            number, apart = divmod(self._next_row - first, stride)
            if apart or not 0 <= number < len(drawn):  # after `skip` or `load_state_dict`
                first, drawn, number = self._next_row, self._draw(self._next_row + mine), 0
            self._next_row = int(min(self._next_row + stride, self._end))
            yield self._batch(drawn[number])

    def skip(self, rows: int) -> int:
        """Skip this many global rows without reading them; return how many were skipped."""
        skipped = int(min(rows, max(0, self._end - self._next_row)))
        self._next_row += skipped
        return skipped

    def rows_left(self, epochs: int) -> int:
        """Return the rows from the position to the end of the first `epochs` epochs."""
        return epochs * self._per_epoch - self._next_row

    def end_after(self, epochs: int) -> None:
        """End after this many epochs."""
        self._end = epochs * self._per_epoch

    def _draw(self, places: np.ndarray) -> np.ndarray:
        """Return the rows at these positions, counted over all epochs; -1 past the end."""
        epochs, within = np.divmod(places, self._per_epoch)
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = permuted(within[here], self._per_epoch, self._seed, int(epoch))
        found[places >= self._end] = -1
        return found

    def _batch(self, rows: np.ndarray) -> Batch:
        width, total = self._seq_len + 1, self._tokens.files.tokens
        starts = rows * self._seq_len
        sizes = np.where(rows < 0, 0, np.minimum(width, total - starts))
        whole, data = sizes == width, np.zeros((self._rows, width), self._tokens.files.dtype)
        into = data if whole.all() else np.empty((int(whole.sum()), width), data.dtype)
        self._tokens.files.gather(starts[whole], sizes[whole], into.reshape(-1))
        if into is not data:
            data[whole] = into
        inputs, targets = data[:, :-1].astype(np.int64), data[:, 1:].astype(np.int64)
        for row in np.flatnonzero(~whole).tolist():
            size = int(sizes[row])
            if size:
                self._tokens.files.read(int(starts[row]), data[row, :size])
            inputs[row], targets[row] = data[row, :-1], data[row, 1:]
            inputs[row, size:] = self._eos_id
            targets[row, max(0, size - 1) :] = IGNORE
        tensors = {
            "tokens": torch.from_numpy(inputs),
            "targets": torch.from_numpy(targets),
            "positions": self._row_positions,
        }
        if self._config.document_mask:
            begins = np.zeros((self._rows, self._seq_len), bool)
            np.equal(data[:, : self._seq_len - 1], self._eos_id, out=begins[:, 1:])
            for row in np.flatnonzero(~whole).tolist():
                begins[row, 1:] = inputs[row, :-1] == self._eos_id  # also after padding
            tensors |= document_tensors(begins)
        return Batch(tensors)

    def epoch_tokens(self) -> tuple[int, bool]:
        """Return the number of tokens in an epoch, and True: it is exact."""
        return self._tokens.files.tokens, True

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, the same on every rank: `row` counts over all epochs."""
        epoch = self._next_row // self._per_epoch
        return {"version": STATE_VERSION, "epoch": epoch, "row": self._next_row, "data": self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, with any number of ranks and rows.

        Raises:
            EnvironmentProblem: the state was saved with other data, or does not belong to this dataset.
        """
        refuse_other_data(state, self._identity, LABEL, "row")
        self._next_row = state["row"]


def build(
    config: TokenShards, *, tokenizer: Tokenizer, seq_len: int, seed: int, **runtime: Any
) -> ShardStreamDataset | ShardRowDataset | ShardPackedDataset:
    """Build `[dataset] type = "token_shards"`.

    Raises:
        EnvironmentProblem: a file is missing, truncated, of another format, or written with another
            tokenizer.
        RecipeError: documents are needed, but the files do not mark them.
    """
    order = {"off": "as listed", "documents": f"documents shuffled by seed {seed}"}
    tokens = _open(config, tokenizer, order.get(config.shuffle, f"rows of {seq_len} shuffled by seed {seed}"))
    if tokens.files.tokens < 2:
        raise EnvironmentProblem(
            f"{LABEL}: a row needs 2 tokens or more, but the files have {tokens.files.tokens}",
            hint="use more data",
        )
    if tokens.documents is None and (config.shuffle == "documents" or config.packing == "best_fit"):
        raise RecipeError(
            f"files of format {config.format!r} do not say where documents begin, so they cannot be shuffled "
            "or packed by documents",
            hint='set dataset.shuffle = "rows" and packing = "stream"',
        )
    if config.packing == "best_fit":
        documents = Documents(tokens.files, cast(DocumentEnds, tokens.documents), tokens.identity, LABEL)
        runtime |= {"tokenizer": tokenizer, "seq_len": seq_len}
        return ShardPackedDataset(documents, config, seed=seed, **runtime)
    kind = ShardRowDataset if config.shuffle == "rows" else ShardStreamDataset
    return kind(tokens, config, seed, tokenizer=tokenizer, seq_len=seq_len, **runtime)


def _open(config: TokenShards, tokenizer: Tokenizer, order: str) -> Tokens:
    documents: DocumentEnds | MegatronDocuments | None
    if config.format == "titan":
        opened, indexes = RemoteFiles(), []
        for path in paths_of(config):
            url = url_of(path)
            indexes.append(read_index(path) if url is None else opened.index(url.rstrip("/")))
            _require_tokenizer(indexes[-1], tokenizer)
            if tokenizer.adds_bos and indexes[-1].bos_id is None:
                logger.warning(
                    "the documents in %s begin without BOS, with which the tokenizer begins a text; "
                    "`titan data tokenize` writes it",
                    path,
                )
            if url is None:
                opened.known |= require_sound(indexes[-1])
        files = TokenFiles(parts_of(indexes), indexes[0].dtype, tokenizer.vocab_size, opened)
        documents = DocumentEnds(indexes, opened)
        contents = {"contents": ", ".join(index.digest for index in indexes)}
    else:
        foreign = open_foreign(config, LABEL)
        files = TokenFiles(foreign.parts, foreign.dtype, tokenizer.vocab_size, OpenFiles(foreign.known))
        files.check_ends()
        documents, contents = foreign.documents, foreign.identity
        if config.document_mask and isinstance(documents, MegatronDocuments):
            documents.require_end_markers(files, tokenizer.eos_id)
    return Tokens(files, documents, {"tokens": files.tokens, **contents, "order": order})


def _require_tokenizer(index: Index, tokenizer: Tokenizer) -> None:
    """Check that shards were written with the recipe's tokenizer.

    Raises:
        EnvironmentProblem: they were written with another one.
    """
    now = tokenizer_identity(tokenizer)
    if index.tokenizer != now:
        raise EnvironmentProblem(
            f"the token shards in {index.folder} were written with the tokenizer {index.tokenizer}, but the "
            f"recipe's is {now}",
            hint="use that tokenizer, or tokenize the data again",
        )
    for shard in index.shards:
        if shard.max_id >= tokenizer.vocab_size:
            raise EnvironmentProblem(
                f"{index.files(shard)[0][0]} has the id {shard.max_id}, but the vocabulary has "
                f"{tokenizer.vocab_size:,} ids",
                hint="use the tokenizer that the data were tokenized with",
            )
