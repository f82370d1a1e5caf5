"""Datasets of text documents: a source of documents, and rows of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from titancli.data import Packed, Text, TokenShards
from titancli.data.fitting import PIECES, Conversation, PackedRows
from titancli.data.packing import PackedDataset
from titancli.data.rows import RowDataset
from titancli.data.source import Source
from titancli.data.stream import encode, groups, with_end
from titancli.data.token_cache import cached_shards
from titancli.protocols import Dataset, Tokenizer
from titancli.registry.component import build


class _Documents:
    """The tokens of a source's documents, cut where they are too long: `titancli.data.rows.Examples`."""

    def __init__(self, source: Source, tokenizer: Tokenizer, longest: int) -> None:
        """Create the examples.

        A piece has at most `longest` inputs; the token after them is its last target and the next piece's
        first input.
        """
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
    source: Source, config: Text, *, tokenizer: Tokenizer, seq_len: int, seed: int, **runtime: Any
) -> Dataset:
    """Return the dataset of a config, whose source is shuffled if `shuffles_source` is set.

    Raises:
        EnvironmentProblem: with `cache_tokens`, the cache cannot be written or the source cannot be read.
    """
    if config.cache_tokens:
        keys = {field.name: getattr(config, field.name) for field in fields(Packed)}
        folder = cached_shards(source, tokenizer)
        shards = TokenShards(paths=[folder], shuffle="documents" if config.shuffle else "off", **keys)
        found: Dataset = build(shards, tokenizer=tokenizer, seq_len=seq_len, seed=seed, **runtime)
        return found
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
