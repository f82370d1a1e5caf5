"""The `preference` dataset: pairs of conversations that end in a chosen and in a rejected answer.

Rows 2i and 2i + 1 form a pair, chosen first; only the answers' tokens are targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from titan_preference import Preference
from titancli.data.chat import Masked
from titancli.data.chat_source import dataset_of
from titancli.data.fitting import Conversation, row_of
from titancli.data.jsonl import BadRow, value_of
from titancli.data.prompt import has_chat_template
from titancli.data.row_formats import Names, Talk, answered
from titancli.data.rows import Row, RowDataset
from titancli.errors import RecipeError
from titancli.protocols import Tokenizer

REFERENCE = ("reference_chosen_logp", "reference_rejected_logp")
"""Keys of a row for the reference model's log-probabilities of the two answers."""


class Pair(NamedTuple):
    answers: tuple[Conversation, Conversation]
    """The chosen and the rejected answer."""
    reference: tuple[float, float] | None
    """Log-probability of each under the reference model, if the data contain it."""


class PairReader:
    """Turns rows into pairs."""

    def __init__(self, masked: Masked, seq_len: int, names: Names, *, reference: bool) -> None:
        self._masked, self._seq_len, self._names, self._reference = masked, seq_len, names, reference

    def __call__(self, row: dict[str, Any]) -> Pair:
        """Return a row's pair.

        Raises:
            BadRow: the row is not a pair, or is too long.
            ChatRefused: the chat template rejects it.
        """
        talks = [answered(row, key, self._names) for key in ("chosen", "rejected")]
        first = _shared(*(talk.messages for talk in talks))
        chosen, rejected = (
            answer_of(self._masked, key, talk._replace(first=first), self._seq_len)
            for key, talk in zip(("chosen", "rejected"), talks, strict=True)
        )
        if any(talk.messages[first]["role"] != "assistant" for talk in talks):
            raise BadRow("'chosen' and 'rejected' have different prompts")
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise BadRow("'chosen' and 'rejected' are identical")
        reference = tuple(_number(row, key) for key in REFERENCE) if self._reference else None
        return Pair((chosen, rejected), reference)  # type: ignore[arg-type]


def answer_of(masked: Masked, key: str, talk: Talk, seq_len: int) -> Conversation:
    """Return a conversation in which the assistant's turns after the context are trained on.

    Raises:
        BadRow: there is none, or the conversation is longer than a row.
        ChatRefused: the chat template rejects it.
    """
    if not any(message["role"] == "assistant" for message in talk.messages[talk.first :]):
        raise BadRow(f"{key!r} has no assistant message after the prompt")
    ids, mask = masked(talk)
    longest = seq_len + 1
    if len(ids) > longest:  # a truncated answer would be a different one
        raise BadRow(f"{key!r} has {len(ids)} tokens, but a row holds {longest} (training.seq_len)")
    if not any(mask[1:]):
        raise BadRow(f"{key!r} has no assistant tokens")
    return Conversation(np.array(ids, np.int64), np.array(mask, bool))


def _shared(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    """Return how many leading messages both share, excluding the last of each."""
    limit = min(len(one), len(other)) - 1
    return next((i for i in range(limit) if one[i] != other[i]), limit)


def _number(row: dict[str, Any], key: str) -> float:
    value = value_of(row, key)
    if type(value) not in (int, float) or not -1e9 < value <= 0:
        raise BadRow(f"{key!r} is {value!r}, which is not a log-probability")
    return float(value)


class PairRows:
    """Makes two rows of each pair."""

    unit = 2

    def __init__(self, seq_len: int, filler_id: int, *, reference: bool) -> None:
        self._seq_len, self._filler_id, self._reference = seq_len, filler_id, reference

    def length(self, example: Pair) -> int:
        return sum(len(answer.tokens) for answer in example.answers)

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        return [[pair] for pair in range(len(lengths)) for _ in range(self.unit)]

    def row(self, examples: Sequence[Pair], number: int) -> Row:
        [pair], answer = examples, number % self.unit
        return self._row([pair.answers[answer]], pair.reference[answer] if pair.reference else 0.0)

    def filler(self) -> Row:
        return self._row([], 0.0)

    def _row(self, answers: list[Conversation], reference: float) -> Row:
        row = row_of(answers, self._seq_len, self._filler_id)
        return {**row, "reference_row_logprobs": np.array(reference, np.float32)} if self._reference else row


def build(config: Preference, *, tokenizer: Tokenizer, seq_len: int, rows: int, **runtime: Any) -> RowDataset:
    """Build `[dataset] type = "preference"`.

    Raises:
        EnvironmentProblem: there is nothing to read.
        RecipeError: the tokenizer has no chat template, or the number of rows is odd.
    """
    if rows % 2:
        raise RecipeError(
            f"training.local_batch_size = {rows}: a pair consists of two rows", hint="use an even number"
        )
    masked = Masked(tokenizer, trailing_newline=config.trailing_newline)
    names = ("reference_logps", "trailing_newline")
    return dataset_of(
        config,
        "preference",
        PairReader(masked, seq_len, Names.of(config), reference=config.reference_logps),
        PairRows(seq_len, tokenizer.eos_id, reference=config.reference_logps),
        {"pairs": True, **{name: getattr(config, name) for name in names}},
        conversations=lambda one: one.answers,
        templated=has_chat_template(tokenizer),
        tokenizer=tokenizer,
        seq_len=seq_len,
        rows=rows,
        **runtime,
    )
