"""The `unpaired` dataset: answers, each of which is desirable or not; each has a row of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from titan_preference.pairs import PairReader, answer_of
from titancli.data.chat import Masked
from titancli.data.chat_source import dataset_of
from titancli.data.fitting import Conversation, row_of
from titancli.data.jsonl import BadRow, value_of
from titancli.data.prompt import has_chat_template
from titancli.data.row_formats import Names, answered

if TYPE_CHECKING:
    from titan_preference import Unpaired
    from titancli.protocols import Dataset, Tokenizer


class Labelled(NamedTuple):
    """The answers of a row of the data, one or two, and which are desirable."""

    answers: tuple[Conversation, ...]
    desirable: tuple[bool, ...]


def of_answer(masked: Masked, seq_len: int, names: Names) -> Callable[[dict[str, Any]], Labelled]:
    """Return the function that reads rows of `prompt`, `completion` and `label`."""

    def read(row: dict[str, Any]) -> Labelled:
        talk, label = answered(row, "completion", names), value_of(row, names.field("label"))
        if not isinstance(label, bool):
            raise BadRow(f"'label' is {label!r}, neither true nor false")
        return Labelled((answer_of(masked, "completion", talk, seq_len),), (label,))

    return read


def of_pair(masked: Masked, seq_len: int, names: Names) -> Callable[[dict[str, Any]], Labelled]:
    """Return the function that reads pairs of a chosen and a rejected answer."""
    pair = PairReader(masked, seq_len, names, reference=False)
    return lambda row: Labelled(pair(row).answers, (True, False))


class AnswerRows:
    """Makes a row of each answer, with `desirable` [B] fp32, 1 or 0."""

    unit = 1

    def __init__(self, seq_len: int, filler_id: int, *, answers: int) -> None:
        """`answers`: number of answers of each example."""
        self._seq_len, self._filler_id, self._answers = seq_len, filler_id, answers

    def length(self, example: Labelled) -> int:
        return sum(len(answer.tokens) for answer in example.answers)

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        return [[example] for example in range(len(lengths)) for _ in range(self._answers)]

    def row(self, examples: Sequence[Labelled], number: int) -> dict[str, np.ndarray]:
        [example], answer = examples, number % self._answers
        return self._row([example.answers[answer]], example.desirable[answer])

    def filler(self) -> dict[str, np.ndarray]:
        return self._row([], False)

    def _row(self, answers: list[Conversation], desirable: bool) -> dict[str, np.ndarray]:
        row = row_of(answers, self._seq_len, self._filler_id)
        return {**row, "desirable": np.array(desirable, np.float32)}


def build(config: Unpaired, *, tokenizer: Tokenizer, seq_len: int, **runtime: Any) -> Dataset:
    """Build `[dataset] type = "unpaired"`.

    Raises:
        EnvironmentProblem: there is nothing to read.
        RecipeError: the tokenizer has no chat template.
    """
    masked = Masked(tokenizer, trailing_newline=config.trailing_newline)
    return dataset_of(
        config,
        "unpaired",
        (of_pair if config.pairs else of_answer)(masked, seq_len, Names.of(config)),
        AnswerRows(seq_len, tokenizer.eos_id, answers=2 if config.pairs else 1),
        {"unpaired": True, "pairs": config.pairs, "trailing_newline": config.trailing_newline},
        conversations=lambda one: one.answers,
        templated=has_chat_template(tokenizer),
        tokenizer=tokenizer,
        seq_len=seq_len,
        **runtime,
    )
