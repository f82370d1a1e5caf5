"""Datasets of whole documents: with labels, in pairs, or in groups that belong together.

Unlike in a dataset for the prediction of tokens, all tokens of a document are inputs. The position of its
last token has a target, which marks it: `pooled` of `titan_heads.pooling` finds it. Its value is not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from titan_preference.pairs import PairReader
from titancli import report
from titancli.data.chat import Masked
from titancli.data.chat_source import dataset_of
from titancli.data.fitting import Conversation, best_fit, row_of
from titancli.data.jsonl import BadRow, check_characters, value_of
from titancli.data.prompt import begun, templated
from titancli.data.row_formats import Names, Talk, check_messages, format_of_row, talk_of
from titancli.data.rows import Row
from titancli.errors import RecipeError, TitanError

if TYPE_CHECKING:
    from titan_heads import Documents, EmbeddingPairs, Labelled, RewardPairs
    from titancli.protocols import Dataset, Tokenizer


class Document(NamedTuple):
    tokens: np.ndarray
    """[n] int64, n > 0."""
    label: np.ndarray | None = None
    """int64 [], float32 [], or float32 [classes]."""


class Group(NamedTuple):
    """Documents that take a row each."""

    documents: list[Document]
    margin: float = 0.0


# --------------------------------------------------------------------------------------------- reading


class DocumentReader:
    """Turns texts and conversations into tokens."""

    def __init__(self, config: Documents, tokenizer: Tokenizer, seq_len: int) -> None:
        self._config, self._tokenizer, self._seq_len = config, tokenizer, seq_len
        self._names = Names.of(config)
        self._cut = 0

    def of_row(self, row: dict[str, Any]) -> np.ndarray:
        """Return the tokens of the text or the conversation that a row is, in any of its formats.

        Raises:
            BadRow: it is neither, is empty, or is too long.
            ChatRefused: the chat template rejects it.
        """
        return self._fitted("it", talk_of(row, format_of_row(row, self._names) or "text", self._names))

    def of_value(self, key: str, value: Any) -> np.ndarray:
        """Return the tokens of a text or of a list of messages.

        Raises:
            BadRow: it is neither, is empty, or is too long.
            ChatRefused: the chat template rejects it.
        """
        if isinstance(value, str):
            check_characters(key, value)
            return self._fitted(repr(key), Talk([], text=value))
        return self._fitted(repr(key), Talk(check_messages(key, value, self._names)))

    def _fitted(self, what: str, talk: Talk) -> np.ndarray:
        ids = self._tokens(talk)
        if not ids:
            raise BadRow(f"{what} is empty")
        if len(ids) > self._seq_len:
            if self._config.too_long == "skip":
                raise BadRow(f"{what} has {len(ids)} tokens, but a row holds {self._seq_len}")
            self._cut += 1
            report("cut_rows", self._cut, reduce="max")
        return np.array(ids[: self._seq_len], np.int64)

    def _tokens(self, talk: Talk) -> list[int]:
        tokenizer = self._tokenizer
        if talk.text is None:
            return tokenizer.chat(talk.messages, **templated(tokenizer.chat, talk.options))
        ids = tokenizer.encode(talk.text)
        end = [tokenizer.eos_id] if self._config.append_end else []
        return [*begun(tokenizer, ids), *end] if ids else []


class LabelReader:
    """Turns a row's label into a number, or into numbers."""

    def __init__(self, config: Labelled) -> None:
        self._key = Names.of(config).field("label")
        self._classes, self._several = config.classes, config.several
        self._numbers = {name: number for number, name in enumerate(config.classes)}

    def __call__(self, row: dict[str, Any]) -> np.ndarray:
        """
        Raises:
            BadRow: it is no class, no list of classes, or no number.
        """
        value = value_of(row, self._key)
        if self._several:
            if not isinstance(value, list):
                raise BadRow(f"{self._key!r} is {type(value).__name__}, not a list of classes")
            found = np.zeros(len(self._classes), np.float32)
            found[[self._class(one) for one in value]] = 1.0
            return found
        if self._classes:
            return np.array(self._class(value), np.int64)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise BadRow(f"{self._key!r} is {value!r}, which is not a number")
        return np.array(value, np.float32)

    def _class(self, value: Any) -> int:
        if isinstance(value, str) and value in self._numbers:
            return self._numbers[value]
        if type(value) is int and 0 <= value < len(self._classes):
            return value
        known = ", ".join(self._classes[:8]) + (", …" if len(self._classes) > 8 else "")
        raise BadRow(
            f"{self._key!r} is {value!r}, which is none of the {len(self._classes)} classes ({known})"
        )


# ------------------------------------------------------------------------------------------------ rows


def _marked(documents: Sequence[Document], seq_len: int, filler_id: int, *, packed: bool = False) -> Row:
    """Return one row of documents, with a target at the last token of each."""
    said = []
    for tokens, _ in documents:
        last = np.zeros(len(tokens) + 1, bool)
        last[-1] = True
        said.append(Conversation(np.append(tokens, filler_id), last))
    return row_of(said, seq_len, filler_id, documents=packed)


class LabelledRows:
    """Makes rows of documents with labels: several per row, best fit first, or one."""

    unit = 1

    def __init__(self, seq_len: int, filler_id: int, none: np.ndarray, *, pack: bool) -> None:
        """`none`: a label for the positions that have none."""
        self._seq_len, self._filler_id, self._none, self._pack = seq_len, filler_id, none, pack

    def length(self, example: Document) -> int:
        return len(example.tokens)

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        return best_fit(lengths, self._seq_len) if self._pack else [[one] for one in range(len(lengths))]

    def row(self, examples: Sequence[Document], number: int) -> Row:
        row = _marked(examples, self._seq_len, self._filler_id, packed=self._pack)
        labels = np.repeat(self._none[None], self._seq_len, 0)
        at = 0
        for tokens, label in examples:
            at += len(tokens)
            labels[at - 1] = label
        return {**row, "labels": labels}

    def filler(self) -> Row:
        return self.row([], 0)


class GroupRows:
    """Makes a row of each document of a group."""

    def __init__(self, seq_len: int, filler_id: int, unit: int, *, margins: bool = False) -> None:
        self._seq_len, self._filler_id, self.unit, self._margins = seq_len, filler_id, unit, margins

    def length(self, example: Group) -> int:
        return sum(len(document.tokens) for document in example.documents)

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        return [[group] for group in range(len(lengths)) for _ in range(self.unit)]

    def row(self, examples: Sequence[Group], number: int) -> Row:
        [group] = examples
        return self._row([group.documents[number % self.unit]], group.margin)

    def filler(self) -> Row:
        return self._row([], 0.0)

    def _row(self, documents: list[Document], margin: float) -> Row:
        row = _marked(documents, self._seq_len, self._filler_id)
        return {**row, "margin": np.array(margin, np.float32)} if self._margins else row


# ------------------------------------------------------------------------------------------- datasets


def build_labelled(config: Labelled, *, tokenizer: Tokenizer, seq_len: int, **runtime: Any) -> Dataset:
    """Build `[dataset] type = "labelled"`.

    Raises:
        EnvironmentProblem: there is nothing to read.
    """
    document, label = DocumentReader(config, tokenizer, seq_len), LabelReader(config)

    def read(row: dict[str, Any]) -> Document:
        return Document(document.of_row(row), label(row))

    none = np.zeros(len(config.classes) if config.several else (), np.float32)
    if config.classes and not config.several:
        none = none.astype(np.int64)
    maker = LabelledRows(seq_len, tokenizer.eos_id, none, pack=config.pack)
    keys = ("classes", "several", "append_end", "too_long", "pack")
    settings = {key: getattr(config, key) for key in keys}
    given = {"tokenizer": tokenizer, "seq_len": seq_len, "templated": _templated(tokenizer), **runtime}
    return dataset_of(config, "labelled", read, maker, settings, **given)


def build_reward_pairs(config: RewardPairs, *, tokenizer: Tokenizer, seq_len: int, **runtime: Any) -> Dataset:
    """Build `[dataset] type = "reward_pairs"`.

    Raises:
        EnvironmentProblem: there is nothing to read.
        RecipeError: the tokenizer has no chat template, or the number of rows is odd.
    """
    # A row holds all tokens, not all but one.
    pair = PairReader(Masked(tokenizer), seq_len - 1, names := Names.of(config), reference=False)

    def read(row: dict[str, Any]) -> Group:
        documents = [Document(answer.tokens) for answer in pair(row).answers]
        return Group(documents, _margin(names.field("margin"), row) if config.margin else 0.0)

    maker = GroupRows(seq_len, tokenizer.eos_id, 2, margins=config.margin)
    given = {"tokenizer": tokenizer, "seq_len": seq_len, **_fitting(runtime, 2)}
    return dataset_of(config, "reward_pairs", read, maker, {"margin": config.margin}, **given)


def _margin(key: str, row: dict[str, Any]) -> float:
    value = value_of(row, key)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadRow(f"{key!r} is {value!r}, which is not a number")
    return float(value)


def build_embedding_pairs(
    config: EmbeddingPairs, *, tokenizer: Tokenizer, seq_len: int, **runtime: Any
) -> Dataset:
    """Build `[dataset] type = "embedding_pairs"`.

    Raises:
        EnvironmentProblem: there is nothing to read.
        RecipeError: the number of rows does not fit.
    """
    document = DocumentReader(config, tokenizer, seq_len)
    names = Names.of(config)
    keys = [names.field(name) for name in ("anchor", "positive", "negative")[: config.unit]]

    def read(row: dict[str, Any]) -> Group:
        return Group([Document(document.of_value(key, value_of(row, key))) for key in keys])

    settings = {key: getattr(config, key) for key in ("negatives", "append_end", "too_long")}
    maker = GroupRows(seq_len, tokenizer.eos_id, config.unit)
    runtime = {**_fitting(runtime, config.unit), "templated": _templated(tokenizer)}
    given = {"tokenizer": tokenizer, "seq_len": seq_len, **runtime}
    return dataset_of(config, "embedding_pairs", read, maker, settings, **given)


def _templated(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer has a chat template; texts need none."""
    try:
        return tokenizer.chat_fingerprint is not None
    except TitanError:
        return False


def _fitting(runtime: dict[str, Any], unit: int) -> dict[str, Any]:
    if runtime["rows"] % unit:
        raise RecipeError(
            f"training.local_batch_size = {runtime['rows']}: an example takes {unit} rows",
            hint=f"use a multiple of {unit}",
        )
    return runtime
