"""Rows of conversations from JSON Lines or a Hugging Face dataset; bad rows are logged and counted, or
rejected."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NoReturn, Protocol

import numpy as np

from titancli.data import HFDataset, RowsOfExamples
from titancli.data.chat_template import ChatRefused
from titancli.data.files import TextFile, corpus_identity
from titancli.data.fitting import Conversation
from titancli.data.hf_datasets import (
    GROUP,
    MappedFiles,
    at_revision,
    contents_of,
    load,
    refuse_hub_keys,
)
from titancli.data.jsonl import BadRow, BadRows, LineReader, Row, parse
from titancli.data.remarks import remarks
from titancli.data.row_check import BAD, CUT, FIRST, RowCheck
from titancli.data.row_files import row_files
from titancli.data.rows import RowDataset, RowMaker
from titancli.data.source import document_order
from titancli.data.tables import without_nulls
from titancli.errors import EnvironmentProblem, TitanError
from titancli.observe.metrics import collector
from titancli.protocols import Tokenizer

logger = logging.getLogger(__name__)


class Rows(Protocol):
    label: str
    identity: dict[str, Any]

    @property
    def count(self) -> int: ...

    def index(self) -> None:
        """Count the rows before the members below are used; these are as in
        `titancli.data.jsonl.LineReader`."""
        ...

    def first(self, count: int) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
        """Yield the location of each of the first rows, and the row, or why it is bad."""
        ...

    def order(self, epoch: int) -> np.ndarray: ...

    def mark(self, epoch: int, place: int) -> dict[str, Any]: ...

    def place(self, epoch: int, mark: Mapping[str, Any]) -> int: ...

    def row(self, row: int) -> tuple[str, dict[str, Any] | BadRow]:
        """Return a row's location as shown to users, and the row, or why it is bad."""
        ...

    def read(
        self, epoch: int, mark: dict[str, Any] | None
    ) -> Iterator[tuple[str, dict[str, Any] | BadRow, dict[str, Any]]]:
        """Yield each row's location as shown to users, the row, or why it is bad, and the mark to resume
        from it."""
        ...


class LineRows:
    """Rows of JSON Lines files."""

    def __init__(self, label: str, config: RowsOfExamples, files: list[TextFile], seed: int) -> None:
        self.label, self._max_bytes = label, config.max_bytes
        self.identity = corpus_identity(label, files, shuffle=config.shuffle, seed=seed, text=False)
        self._reader = LineReader(
            files,
            shuffle=config.shuffle,
            seed=seed,
            max_bytes=config.max_bytes,
            skip_damaged=config.skip_damaged,
        )
        self.index, self.order = self._reader.index, self._reader.order
        self.mark, self.place = self._reader.mark, self._reader.place

    @property
    def count(self) -> int:
        return self._reader.count

    def read(
        self, epoch: int, mark: dict[str, Any] | None
    ) -> Iterator[tuple[str, dict[str, Any] | BadRow, dict[str, Any]]]:
        for file, row, place in self._reader.read(epoch, mark):
            yield *self._parsed(file, row), place

    def first(self, count: int) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
        return (self._parsed(file, row) for file, row, _ in islice(self._reader.in_order(None), count))

    def row(self, row: int) -> tuple[str, dict[str, Any] | BadRow]:
        return self._parsed(*self._reader.row(row))

    def _parsed(self, file: TextFile, row: Row) -> tuple[str, dict[str, Any] | BadRow]:
        found: dict[str, Any] | BadRow
        try:
            found = parse(row.data, self._max_bytes)
        except BadRow as reason:
            found = reason
        return self._reader.where(file, row), found


class HFRows:
    """Rows of a dataset on disk, read by the `datasets` library."""

    def __init__(self, label: str, config: RowsOfExamples, dataset: Any, seed: int) -> None:
        self.label, self._dataset, self._seed, self._shuffle = label, dataset, seed, config.shuffle
        self._path, self.count, self._mapped = config.path, len(dataset), MappedFiles(dataset)
        self.identity: dict[str, Any] = {
            "rows": len(dataset),
            "contents": contents_of(config.path, dataset),
            "order": f"shuffled by seed {seed}" if config.shuffle else "as listed",
            **at_revision(config),
        }

    def index(self) -> None:
        """Do nothing: the rows are counted from the start."""

    def first(self, count: int) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
        return map(self.row, range(min(count, self.count)))

    def order(self, epoch: int) -> np.ndarray:
        return document_order(self._seed, epoch, self.count, shuffle=self._shuffle)

    def mark(self, epoch: int, place: int) -> dict[str, Any]:
        return {"document": place}

    def place(self, epoch: int, mark: Mapping[str, Any]) -> int:
        return int(mark["document"])

    def row(self, row: int) -> tuple[str, dict[str, Any] | BadRow]:
        try:
            with self._mapped.unchanged(1):
                found = self._dataset[row]
        except TitanError:
            raise
        except Exception as error:  # any error of the file system or Arrow
            _unreadable(self.label, error)
        return f"{self._path}, row {row}", without_nulls(found)

    def read(
        self, epoch: int, mark: dict[str, Any] | None
    ) -> Iterator[tuple[str, dict[str, Any] | BadRow, dict[str, Any]]]:
        order = self.order(epoch)
        for first in range(mark["document"] if mark else 0, len(order), GROUP):
            numbers = order[first : first + GROUP].tolist()
            try:
                with self._mapped.unchanged(len(numbers)):
                    columns = self._dataset[numbers]
            except TitanError:
                raise
            except Exception as error:  # any error of the file system or Arrow
                _unreadable(self.label, error)
            for i, number in enumerate(numbers):
                row = without_nulls({name: values[i] for name, values in columns.items()})
                yield f"{self._path}, row {number}", row, {"document": first + i}


def _unreadable(label: str, error: Exception) -> NoReturn:
    raise EnvironmentProblem(
        f"{label} cannot be read: {type(error).__name__}: {error}", hint="check dataset.path and split"
    ) from error


def rows_of(config: RowsOfExamples, kind: str, *, seed: int, dp_rank: int) -> Rows:
    """Return the rows that a config names: local files of rows are read here, and the rest by `datasets`:
    names on the Hub, slices of a split, folders of `save_to_disk` or of files named after splits, and formats
    that it alone reads.

    Raises:
        EnvironmentProblem: there is nothing, or it cannot be read.
        RecipeError: a configuration name or a revision is set for local data.
    """
    refuse_hub_keys(config)
    path, label = config.path, f"dataset {kind} ({config.path})"
    if (files := row_files(config)) is not None:
        return LineRows(label, config, files, seed)
    hf = HFDataset(path=path, name=config.name, revision=config.revision, split=config.split)
    dataset = load(hf, progress=dp_rank == 0 and sys.stderr.isatty())
    if len(dataset) == 0:
        raise EnvironmentProblem(f"{label}: split {config.split!r} has no rows", hint="use another split")
    return HFRows(label, config, dataset, seed)


class ChatExamples:
    """Examples made from rows by a function: the `titancli.data.rows.Examples` of conversations and pairs."""

    def __init__(self, rows: Rows, make: Callable[[dict[str, Any]], Any], config: RowsOfExamples) -> None:
        """Create the examples; `make` turns a row into an example, or raises BadRow or ChatRefused."""
        self._rows, self._make, self._bad = rows, make, BadRows(strict=config.strict)
        self._remarked: set[str] = {CUT}  # the metric cut_rows counts them
        self.limits = {"strict": config.strict, "max_bytes": config.max_bytes}
        self.label, self.identity = rows.label, rows.identity
        self.order, self.mark, self.place = rows.order, rows.mark, rows.place

    @property
    def count(self) -> int:
        self._rows.index()
        return self._rows.count

    def example(self, row: int) -> Any:
        """Return the example of a row; if it is bad, log it and return None."""
        where, found = self._rows.row(row)
        try:
            with collector.muted():  # each is made twice: to be measured and to be used
                return self._made(where, found)
        except BadRow as reason:
            self._bad.log(where, reason)
            return None

    def check(self, begin: Callable[[], RowCheck], count: int | None = None) -> RowCheck:
        """Check the first rows, or all. What is found is not said again when these rows are read.

        Args:
            begin: makes the check.

        Raises:
            EnvironmentProblem: the data cannot be read.
        """
        check = begin()
        for where, row in self._rows.first(sys.maxsize if count is None else count):
            try:
                with remarks() as found, collector.muted():
                    example = self._example(row)
            except BadRow as reason:
                check.bad(where, reason)
                continue
            check.row(where, example, found)
        self._remarked |= {one.kind for one in check.findings}
        return check

    def skipped(self, count: int) -> None:
        """Count bad rows that were skipped."""
        self._bad.skipped += count
        self._bad.count()

    def _made(self, where: str, row: dict[str, Any] | BadRow) -> Any:
        """Return the example of a row; log the first remark of each kind.

        Raises:
            BadRow: the row has none.
        """
        with remarks() as found:
            example = self._example(row)
        for kind, text in found.items():
            if kind not in self._remarked:
                self._remarked.add(kind)
                logger.warning("%s: %s; further such rows are not named", where, text)
        return example

    def _example(self, row: dict[str, Any] | BadRow) -> Any:
        """Return the example of a row.

        Raises:
            BadRow: the row has none.
        """
        if isinstance(row, BadRow):
            raise row
        try:
            return self._make(row)
        except ChatRefused as error:
            remedy = f"; {error.hint}" if error.hint and error.hint not in error.message else ""
            raise BadRow(f"{error.message}{remedy}") from error

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[tuple[Any, dict[str, Any]]]:
        for where, row, place in self._rows.read(epoch, mark):
            try:
                example = self._made(where, row)
            except BadRow as reason:
                self._bad.skip(where, reason)
                continue
            self._bad.count()
            yield example, place


def dataset_of(
    config: RowsOfExamples,
    kind: str,
    read: Callable[[dict[str, Any]], Any],
    maker: RowMaker,
    settings: Mapping[str, Any],
    *,
    conversations: Callable[[Any], Iterable[Conversation]] | None = None,
    rows_read: Rows | None = None,
    tokenizer: Tokenizer,
    seq_len: int,
    seed: int,
    dp_rank: int,
    **runtime: Any,
) -> RowDataset:
    """Return a dataset of examples, after a check of the first rows if these are conversations.

    Args:
        kind: name of the component, for messages.
        read: turns a row into an example, or raises BadRow or ChatRefused.
        maker: turns examples into rows of batches.
        settings: what rows depend on besides files, tokenizer and seq_len; a resume with others is rejected.
        conversations: returns the conversations of an example; None: it has none.
        rows_read: the rows that the config names, if they are open already.
        runtime: what else a dataset's builder is given.

    Raises:
        EnvironmentProblem: there is nothing to read, or `config.strict` and the check has found something.
    """
    found = rows_read or rows_of(config, kind, seed=seed, dp_rank=dp_rank)
    named = {name: value for name in ("fields", "roles") if (value := getattr(config, name))}
    examples = ChatExamples(found, read, config)
    check = None
    if conversations is not None:
        check = partial(examples.check, partial(RowCheck, tokenizer, conversations))
        if not collector.is_muted and (dp_rank == 0 or config.strict):
            _say(check(FIRST), say=dp_rank == 0, strict=config.strict)
    return RowDataset(
        examples,
        maker,
        check=check,
        tokenizer=tokenizer,
        seq_len=seq_len,
        dp_rank=dp_rank,
        repeat=config.repeat,
        settings={**settings, **named},
        length_index=config.length_index,
        padding=config.padding,
        **runtime,
    )


def _say(check: RowCheck, *, say: bool, strict: bool) -> None:
    """Log what a check of the first rows has found. Bad rows are logged where they are skipped.

    Raises:
        EnvironmentProblem: with `strict`, if there is anything but truncated rows.
    """
    if strict:
        check.refuse()
    for line in check.lines(leave_out=BAD) if say else ():
        logger.warning("check of the first rows: %s", line)
