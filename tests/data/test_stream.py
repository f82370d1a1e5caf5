"""The stream of tokens, out of a source and a tokenizer that know only what the protocols ask of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titancli.data.source import Piece, document_order
from titancli.data.stream import Frame, Position, TokenStream
from titancli.protocols import TokenizerDefaults


class Letters(TokenizerDefaults):
    """A token for each letter; blanks have none. It has no `encode_arrays`, as a plugin's may not."""

    vocab_size, eos_id = 256, 0
    files: dict[str, str | Path] = {}  # noqa: RUF012

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text if letter != " "]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return []


class Listed:
    """Documents given as lists of pieces."""

    label = "the list"

    def __init__(self, documents: list[list[str]]) -> None:
        self.identity: dict[str, Any] = {}
        self._pieces = [
            (text, i == 0, i == len(document) - 1)
            for document in documents
            for i, text in enumerate(document)
        ]

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Piece]:
        for i in range(mark["piece"] if mark else 0, len(self._pieces)):
            yield Piece(*self._pieces[i], {"piece": i})


def opened(documents: list[list[str]], *, repeat: bool = False, at: Position | None = None) -> TokenStream:
    epochs = math.inf if repeat else 1
    return TokenStream(
        Listed(documents), Letters(), Frame(None, Letters().eos_id), epochs=epochs, at=at or Position()
    )


def expected(documents: list[list[str]]) -> tuple[list[int], list[bool]]:
    tokens: list[int] = []
    begins: list[bool] = []
    for document in documents:
        if ids := Letters().encode("".join(document)):
            tokens += [*ids, 0]
            begins += [True] + [False] * len(ids)
    return tokens, begins


@pytest.mark.parametrize(
    "documents",
    [
        [["ab"], ["c"]],
        [["ab", "cd", "e"], ["f"]],
        [[" ", "ab", " "], ["  "], ["", "", "c"], [""]],
    ],
)
def test_silent_pieces_and_documents_leave_no_trace(documents: list[list[str]]) -> None:
    tokens, begins = opened(documents).read(100)
    assert (tokens.tolist(), begins.tolist()) == expected(documents)


texts = st.lists(st.lists(st.text("ab ", max_size=5), min_size=1, max_size=3), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=12), st.booleans())
def test_reading_skipping_and_reopening_follow_the_plain_concatenation(
    documents: list[list[str]], moves: list[tuple[bool, int]], repeat: bool
) -> None:
    documents = [*documents, ["x"]]
    plain = expected(documents)[0] * (100 if repeat else 1)
    stream, at = opened(documents, repeat=repeat), 0
    for reads, count in moves:
        if reads:
            assert stream.read(count)[0].tolist() == plain[at : at + count + 1]
        else:
            assert stream.skip(count) == min(count, len(plain) - at)
        at = min(at + count, len(plain))
        stream = opened(documents, repeat=repeat, at=stream.position)


@settings(max_examples=60, deadline=None)
@given(texts, st.integers(0, 20), st.integers(0, 20))
def test_position_does_not_tell_reading_from_skipping(documents: list[list[str]], a: int, b: int) -> None:
    documents = [*documents, ["x"]]
    one, other = opened(documents, repeat=True), opened(documents, repeat=True)
    one.skip(a)
    one.read(b)
    other.read(a)
    other.skip(b)
    assert one.position == other.position


def test_order_is_a_permutation_that_never_changes() -> None:
    order = document_order(2**40 + 5, 3, 10, shuffle=True)
    assert sorted(order.tolist()) == list(range(10))
    assert order.tolist() == [0, 7, 6, 3, 4, 8, 2, 1, 9, 5], "an old checkpoint means this order"
    assert np.array_equal(document_order(5, 3, 10, shuffle=False), np.arange(10))
    orders = [
        document_order(seed, epoch, 50, shuffle=True).tolist() for seed in (0, 1, 2**32) for epoch in (0, 1)
    ]
    assert len({tuple(o) for o in orders}) == 6
