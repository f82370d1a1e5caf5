"""Rows of whole examples: choosing which examples share a row, and building it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from titancli.data.rows import Row
from titancli.observe.metrics import report
from titancli.protocols.batch import IGNORE

PIECES = 1024
"""Documents, or pieces of long ones, that are packed together."""


class Conversation(NamedTuple):
    """Tokens, and which of them are trained on."""

    tokens: np.ndarray
    """[n] int64."""
    trained: np.ndarray
    """[n] bool; the first is never a target."""


class PackedRows:
    """Makes rows of conversations: several per row, best fit first, or one."""

    unit = 1

    def __init__(self, seq_len: int, filler_id: int, *, pack: bool) -> None:
        self._seq_len, self._filler_id, self._pack = seq_len, filler_id, pack
        self._places = self._filled = 0

    def length(self, example: Conversation) -> int:
        return len(example.tokens) - 1

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        if not self._pack:
            return [[example] for example in range(len(lengths))]
        bins = best_fit(lengths, self._seq_len)
        self._places += len(bins) * self._seq_len
        self._filled += sum(lengths)
        report("wasted_tokens", 1.0 - self._filled / max(self._places, 1), reduce="max")  # of all ranks
        return bins

    def row(self, examples: Sequence[Conversation], number: int) -> Row:
        return row_of(examples, self._seq_len, self._filler_id, documents=self._pack)

    def filler(self) -> Row:
        return row_of([], self._seq_len, self._filler_id, documents=self._pack)


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return which items share a bin of `size`: the longest first, each into the fullest bin with room.

    Items within a bin, and bins by their first items, stay in order, so that short ones do not come last.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room left and index of each bin that is not full; sorted
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, (lengths[item], 0))
        if at == len(rooms):
            room, number = size, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(at)
        bins[number].append(item)
        if room > lengths[item]:
            insort(rooms, (room - lengths[item], number))
    return sorted(sorted(items) for items in bins)


def row_of(
    conversations: Sequence[Conversation], seq_len: int, filler_id: int, *, documents: bool = False
) -> Row:
    """Return one row of conversations that fit into it; the remainder has no targets.

    With `documents` it has `document_ids`, where the remainder is a document of its own.
    """
    tokens = np.full(seq_len, filler_id, np.int64)
    targets = np.full(seq_len, IGNORE, np.int64)
    positions, ids = np.empty(seq_len, np.int64), np.empty(seq_len, np.int32)
    at = 0
    for number, (said, trained) in enumerate(conversations):
        end = at + len(said) - 1
        tokens[at:end] = said[:-1]
        targets[at:end] = np.where(trained[1:], said[1:], IGNORE)
        positions[at:end] = np.arange(end - at)
        ids[at:end] = number
        at = end
    positions[at:] = np.arange(seq_len - at)
    ids[at:] = len(conversations)
    row = {"tokens": tokens, "targets": targets, "positions": positions}
    return {**row, "document_ids": ids} if documents else row
