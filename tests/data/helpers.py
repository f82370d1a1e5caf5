"""A dataset built as the engine builds it, and the rows that it ought to give, made in the plainest way."""

from __future__ import annotations

from typing import Any

import torch

from titancli.data import ByteTokenizer
from titancli.protocols.batch import Batch
from titancli.registry.component import build


def make(config: Any, *, tokenizer: Any = None, seq_len=16, rows=2, dp_rank=0, dp_size=1, seed=7) -> Any:
    tokenizer = tokenizer or build(ByteTokenizer())
    runtime = {"seq_len": seq_len, "rows": rows, "dp_rank": dp_rank, "dp_size": dp_size, "seed": seed}
    return build(config, tokenizer=tokenizer, **runtime)


def stream(texts: list[str], tokenizer: Any = None) -> list[int]:
    """The tokens of one epoch."""
    tokenizer = tokenizer or build(ByteTokenizer())
    tokens: list[int] = []
    for text in texts:
        if ids := tokenizer.encode(text):
            tokens += [*ids, tokenizer.eos_id]
    return tokens


def rows_of(batches: list[Batch]) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of each row."""
    return [
        (tokens.tolist(), targets.tolist())
        for batch in batches
        for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True)
    ]


def global_rows(config: Any, batches: int, *, dp_size: int, rows: int, state: Any = None, **options: Any):
    """The global rows of so many micro-batches over all ranks, and the state after them (on every rank)."""
    ranks = [make(config, dp_rank=d, dp_size=dp_size, rows=rows, **options) for d in range(dp_size)]
    if state is not None:
        for rank in ranks:
            rank.load_state_dict(state)
    iterators = [iter(rank) for rank in ranks]
    result: list[tuple[list[int], list[int]]] = []
    for _ in range(batches):
        micro = [next(iterator, None) for iterator in iterators]
        assert len({batch is None for batch in micro}) == 1, "ranks disagree on where the data ends"
        if micro[0] is None:
            break
        result += rows_of(micro)
    states = [rank.state_dict() for rank in ranks]
    assert all(s == states[0] for s in states), "ranks disagree on the position"
    return result, states[0]


def same(one: Batch, other: Batch) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
