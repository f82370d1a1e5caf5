"""Datasets of text documents: a source of documents, and how its tokens become rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from titancli.data.fitting import PIECES, Conversation, PackedRows
from titancli.data.indexed_text import IndexedSource, TextPackedDataset, TextStreamDataset, TextTokens
from titancli.data.packing import PackedDataset
from titancli.data.rows import RowDataset
from titancli.data.source import Source
from titancli.data.stream import encode, groups, with_end
from titancli.protocols import Tokenizer


class _Documents:
    """The tokens of a source's documents, cut where they are too long: `titancli.data.rows.Examples`."""

    def __init__(self, source: Source, tokenizer: Tokenizer, longest: int) -> None:
        """`longest`: inputs of a piece; the token behind them is its last target and the next one's input."""
        self._source, self._tokenizer, self._longest = source, tokenizer, longest
        self.label, self.identity = source.label, source.identity

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[tuple[Conversation, dict[str, Any]]]:
        past = mark["past"] if mark else 0
        for group in groups(self._source.read(epoch, mark["piece"] if mark else None)):
            for piece, ids in zip(group, encode(self._tokenizer, [p.text for p in group]), strict=True):
                tokens = with_end(ids, self._tokenizer.eos_id) if piece.ends and len(ids) else ids
                for first in range(past, len(tokens) - 1, self._longest):
                    part = tokens[first : first + self._longest + 1].astype(np.int64)
                    yield Conversation(part, np.ones(len(part), bool)), {"piece": piece.mark, "past": first}
                past = 0


def text_dataset(
    source: Source, config: Any, *, tokenizer: Tokenizer, seq_len: int, seed: int = 0, **runtime: Any
) -> PackedDataset | RowDataset:
    """Return the dataset of a config that has the fields `packing`, `max_document_length`, `repeat` and
    `document_mask`; perhaps `length_index` and `fim`, for an `IndexedSource`. Only `fim` needs the seed."""
    if getattr(config, "length_index", False):
        tokens = TextTokens(cast(IndexedSource, source), tokenizer)
        options = {"tokenizer": tokenizer, "seq_len": seq_len, **runtime}
        if config.packing == "stream":
            return TextStreamDataset(
                tokens, repeat=config.repeat, document_mask=config.document_mask, **options
            )
        return TextPackedDataset(tokens, config, seed=seed, **options)
    if config.packing == "stream":
        return PackedDataset(
            source,
            repeat=config.repeat,
            document_mask=config.document_mask,
            tokenizer=tokenizer,
            seq_len=seq_len,
            **runtime,
        )
    longest = min(seq_len, config.max_document_length or seq_len)
    return RowDataset(
        _Documents(source, tokenizer, longest),
        PackedRows(seq_len, tokenizer.eos_id, pack=True),
        tokenizer=tokenizer,
        seq_len=seq_len,
        repeat=config.repeat,
        settings={"packing": config.packing, "longest": longest},
        group=PIECES,
        templated=False,
        **runtime,
    )
