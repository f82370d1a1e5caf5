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
from titancli.data.stream import Frame, encode, groups
from titancli.data.token_cache import cached_shards
from titancli.observe.metrics import collector
from titancli.protocols import Dataset, Tokenizer
from titancli.registry.component import build

logger = logging.getLogger(__name__)


class _Documents:
    """The tokens of a source's documents, cut where they are too long: `titancli.data.rows.Examples`."""

    def __init__(self, source: Source, tokenizer: Tokenizer, frame: Frame, longest: int) -> None:
        """Create the examples.

        A piece has at most `longest` inputs; the token after them is its last target and the next piece's
        first input.
        """
        self._source, self._tokenizer, self._frame, self._longest = source, tokenizer, frame, longest
        self.label, self.identity = source.label, source.identity

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[tuple[Conversation, dict[str, Any]]]:
        past = mark["past"] if mark else 0
        for group in groups(self._source.read(epoch, mark["piece"] if mark else None)):
            for piece, ids in zip(group, encode(self._tokenizer, [p.text for p in group]), strict=True):
                begins, ends = (flag and len(ids) > 0 for flag in (piece.begins, piece.ends))
                tokens = self._frame.around(ids, begins=begins, ends=ends)
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
