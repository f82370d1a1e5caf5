"""Datasets of text documents: a source of documents, and rows of its tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from titancli.data import Packed, Text, TokenShards
from titancli.data.fitting import PIECES, Conversation, PackedRows
from titancli.data.packing import PackedDataset
from titancli.data.rows import RowDataset
from titancli.data.source import Source
from titancli.data.stream import Frame, framed
from titancli.data.token_cache import cached_shards
from titancli.observe.metrics import collector
from titancli.protocols import Dataset, Tokenizer
from titancli.registry.component import build

logger = logging.getLogger(__name__)


class _Documents:
    """The tokens of a source's documents, cut where they are too long: `titancli.data.rows.Examples`.

    Documents are cut as if they were read whole: no target is lost where a long one is read in pieces.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer, frame: Frame, longest: int) -> None:
        """Create the examples.

        An example has at most `longest` inputs; the token after them is its last target and the next
        example's first input.
        """
        self._source, self._tokenizer, self._frame, self._longest = source, tokenizer, frame, longest
        self.label, self.identity = source.label, source.identity

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[tuple[Conversation, dict[str, Any]]]:
        document = _Document(mark["past"] if mark else 0)
        pieces = self._source.read(epoch, mark["piece"] if mark else None)
        for piece, tokens, begins in framed(pieces, self._tokenizer, self._frame):
            if begins:
                yield from document.cut(self._longest, whole=True)
                document = _Document(document.skip)
            document.add(tokens, piece.mark)
            yield from document.cut(self._longest, whole=piece.ends)
        yield from document.cut(self._longest, whole=True)


class _Document:
    """The tokens of a document that are not in an example yet, from one piece or several."""

    def __init__(self, skip: int) -> None:
        """Create a document of which `skip` tokens of the first piece are not wanted."""
        self.skip = skip
        self._tokens = np.empty(0, np.int64)
        self._pieces: list[tuple[int, dict[str, Any]]] = []
        """Where each piece begins, counted from the first of the tokens, and its mark."""

    def add(self, tokens: np.ndarray, mark: dict[str, Any]) -> None:
        """Append a piece."""
        self._pieces.append((len(self._tokens) - self.skip, mark))
        self._tokens = np.concatenate((self._tokens, tokens[self.skip :].astype(np.int64)))
        self.skip = 0

    def cut(self, longest: int, *, whole: bool) -> Iterator[tuple[Conversation, dict[str, Any]]]:
        """Yield examples of `longest` inputs, each with its mark, and keep what is left.

        Args:
            whole: whether no piece follows, so that the last example may be shorter.
        """
        first, count = 0, len(self._tokens)
        while count - first > longest or (whole and count - first > 1):
            part = self._tokens[first : first + longest + 1]
            begin, mark = next(one for one in reversed(self._pieces) if one[0] <= first)
            yield Conversation(part, np.ones(len(part), bool)), {"piece": mark, "past": first - begin}
            first += len(part) - 1
        self._tokens = self._tokens[first:]
        moved = [(begin - first, mark) for begin, mark in self._pieces]
        read = sum(begin <= 0 for begin, _ in moved)
        self._pieces = moved[max(0, read - 1) :]


def text_dataset(
    source: Source, config: Text, *, tokenizer: Tokenizer, seq_len: int, seed: int, **runtime: Any
) -> Dataset:
    """Return the dataset of a config, whose source is shuffled if `shuffles_source` is set.

    Raises:
        EnvironmentProblem: with `cache_tokens`, the cache cannot be written or the source cannot be read.
    """
    frame = Frame.of(tokenizer, config.add_bos, config.add_eos)
    said = runtime.get("dp_rank") != 0 or collector.is_muted
    if not said and (tokenizer.bos_id is not None or frame.identity):
        logger.info("%s: %s", source.label, frame)
    if config.cache_tokens:
        keys = {field.name: getattr(config, field.name) for field in fields(Packed)}
        folder = cached_shards(source, tokenizer, frame)
        shards = TokenShards(paths=[folder], shuffle="documents" if config.shuffle else "off", **keys)
        found: Dataset = build(shards, tokenizer=tokenizer, seq_len=seq_len, seed=seed, **runtime)
        return found
    if config.packing == "stream":
        return PackedDataset(
            source,
            repeat=config.repeat,
            document_mask=config.document_mask,
            frame=frame,
            tokenizer=tokenizer,
            seq_len=seq_len,
            **runtime,
        )
    longest = min(seq_len, config.max_document_length or seq_len)
    return RowDataset(
        _Documents(source, tokenizer, frame, longest),
        PackedRows(seq_len, tokenizer.eos_id, pack=True),
        tokenizer=tokenizer,
        seq_len=seq_len,
        repeat=config.repeat,
        settings={"packing": config.packing, "longest": longest, **frame.identity},
        group=PIECES,
        templated=False,
        **runtime,
    )
