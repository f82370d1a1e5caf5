"""Samples into the rows of batches: several whole ones share a row, and do not see each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titancli.errors import TitanError
from titancli.protocols.batch import IGNORE, Batch


@dataclass(frozen=True)
class Sample:
    """One completion of a prompt, to learn from.

    Raises:
        TitanError: there is no prompt, or not one finite log-probability for each token.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Log-probabilities of `tokens`, under the weights that sampled them."""
    advantage: float

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise TitanError("a sample has an empty prompt", hint="the first token would have no context")
        if self.logprobs is None or len(self.logprobs) != len(self.tokens):
            count = 0 if self.logprobs is None else len(self.logprobs)
            raise TitanError(
                f"a sample has {len(self.tokens)} tokens and {count} log-probabilities",
                hint="a generator must return one for each sampled token",
            )
        if wrong := [value for value in self.logprobs if not math.isfinite(value)]:
            raise TitanError(
                f"a sample has a log-probability of {float(wrong[0])}",
                hint="a generator must return those of the model itself, without temperature or top-p",
            )

    @property
    def length(self) -> int:
        """Places in a row: the last token is a target only."""
        return len(self.prompt) + len(self.tokens) - 1


def rows_of(samples: Sequence[Sample], seq_len: int) -> list[list[Sample]]:
    """Distribute samples over rows: the longest first, each in the first row that has room. One without
    tokens is left out: there is nothing to learn from.

    Raises:
        TitanError: a sample is longer than seq_len.
    """
    samples = [sample for sample in samples if len(sample.tokens)]
    if samples and (longest := max(sample.length for sample in samples)) > seq_len:
        raise TitanError(
            f"a sample needs {longest} tokens of a row, but rows have {seq_len}",
            hint="a generator must keep to its limits; or use a larger training.seq_len",
        )
    rows: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda sample: -sample.length):
        place = next((i for i, left in enumerate(room) if left >= sample.length), None)
        if place is None:
            rows.append([])
            room.append(seq_len)
            place = -1
        rows[place].append(sample)
        room[place] -= sample.length
    return rows


def pack(rows: Sequence[Sequence[Sample]], seq_len: int, count: int) -> Batch:
    """`count` rows as a batch for a policy loss; those that are lacking have no targets, on the CPU."""
    tensors: dict[str, Tensor] = {
        "tokens": torch.zeros(count, seq_len, dtype=torch.int64),
        "targets": torch.full((count, seq_len), IGNORE),
        "positions": torch.zeros(count, seq_len, dtype=torch.int64),
        "document_ids": torch.zeros(count, seq_len, dtype=torch.int32),
        "advantages": torch.zeros(count, seq_len, dtype=torch.float32),
        "old_logprobs": torch.zeros(count, seq_len, dtype=torch.float32),
    }
    for number, row in enumerate(rows):
        start = 0
        for document, sample in enumerate(row):
            end, drawn = start + sample.length, start + len(sample.prompt) - 1
            tensors["tokens"][number, start:end] = torch.tensor([*sample.prompt, *sample.tokens[:-1]])
            tensors["targets"][number, drawn:end] = torch.tensor(sample.tokens)
            tensors["positions"][number, start:end] = torch.arange(sample.length)
            tensors["document_ids"][number, start:end] = document
            tensors["advantages"][number, drawn:end] = sample.advantage
            tensors["old_logprobs"][number, drawn:end] = torch.tensor(sample.logprobs, dtype=torch.float32)
            start = end
        # What is left of a row is a document of its own.
        tensors["positions"][number, start:] = torch.arange(seq_len - start)
        tensors["document_ids"][number, start:] = len(row)
    return Batch(tensors)
