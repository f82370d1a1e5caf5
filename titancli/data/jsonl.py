"""A source of files of rows: each row is a document. Bad rows are skipped and counted, or end the run.

Rows are read one at a time, from any byte, so files of any size take little memory. Only if they are shuffled
is every file first read once, to find where its rows begin. Torch-free until a dataset is built.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from titancli.data import JsonLines
from titancli.data.compressed import is_compressed, open_plain, unreadable
from titancli.data.files import PIECE_BYTES, TextFile, corpus_identity, files_of, undamaged
from titancli.data.formats import kind_of_rows
from titancli.data.parquet_file import try_parquet
from titancli.data.row_index import row_starts
from titancli.data.source import Piece, document_order
from titancli.data.tables import lines_of
from titancli.data.unchanged import Stamp, require_unchanged
from titancli.errors import EnvironmentProblem
from titancli.observe.metrics import report
from titancli.protocols import Dataset

logger = logging.getLogger(__name__)

LOGGED = 5
"""Bad rows that are logged one by one; further ones are only counted."""


class Row(NamedTuple):
    """A line of a file."""

    byte: int
    """Byte at which it begins."""
    line: int
    """Line number, from 1."""
    data: bytes | None
    """Content without the line end; None: it is too long."""


class BadRow(Exception):
    """The reason why a row is not a document."""


class LineReader:
    """The rows of files, readable from any row on.

    Files that are not plain JSON Lines are converted once (`titancli.data.tables`), except compressed JSON
    Lines that are read in order.

    Raises:
        EnvironmentProblem: a file cannot be read, or is damaged.
    """

    def __init__(
        self, files: list[TextFile], *, shuffle: bool, seed: int, max_bytes: int, skip_damaged: bool = False
    ) -> None:
        self._files, self._shuffle, self._seed, self._max_bytes = files, shuffle, seed, max_bytes
        self._whole = shuffle or skip_damaged
        """Whether compressed files are decompressed into the cache, too."""
        self._lines: dict[str, str] = {}
        """The paths that converted files are read from."""
        self._starts: list[np.ndarray] = []
        try_parquet(file.path for file in files)
        if skip_damaged:
            self._files = undamaged(files, self._convert)
        else:
            for file in files:
                self._convert(file)
        if shuffle:
            self.index()

    def _convert(self, file: TextFile) -> None:
        kind = kind_of_rows(file.path)
        if kind not in ("jsonl", "text") or (self._whole and _is_compressed(file)):
            self._lines[file.path] = lines_of(file, kind)

    def index(self) -> None:
        """Find where each row begins, once.

        Raises:
            EnvironmentProblem: a file cannot be read.
        """
        if self._starts:
            return
        if not self._whole:
            self._whole = True
            for file in self._files:
                if file.path not in self._lines:
                    self._convert(file)
        self._starts = [row_starts(self._read_from(file)) for file in self._files]
        self._firsts = np.cumsum([0, *(len(starts) for starts in self._starts)])
        """Index of the first row of each file, then the total."""

    def _read_from(self, file: TextFile) -> TextFile:
        """Return the file that rows are read from."""
        lines = self._lines.get(file.path)
        return file if lines is None else TextFile(lines, file.name, *Stamp.of(lines))

    def where(self, file: TextFile, row: Row) -> str:
        """Return a row's location as shown to users."""
        return f"{file.path}, {'row' if file.path in self._lines else 'line'} {row.line}"

    @property
    def count(self) -> int:
        return int(self._firsts[-1])

    def order(self, epoch: int) -> np.ndarray:
        """Return the indices of the rows in the order of an epoch."""
        return document_order(self._seed, epoch, self.count, shuffle=self._shuffle)

    def mark(self, epoch: int, place: int) -> dict[str, Any]:
        """Return the mark of the row at a position in the order."""
        if self._shuffle:
            return {"document": place}
        number, index = self._where(place)
        return {"file": number, "byte": int(self._starts[number][index]), "line": index + 1}

    def place(self, epoch: int, mark: Mapping[str, Any]) -> int:
        """Return the position in the order that a mark refers to."""
        return mark["document"] if self._shuffle else int(self._firsts[mark["file"]]) + mark["line"] - 1

    def _where(self, row: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        return number, row - int(self._firsts[number])

    def row(self, row: int) -> tuple[TextFile, Row]:
        """Return a row by its index, with its file.

        Raises:
            EnvironmentProblem: the file cannot be read, or has changed.
        """
        number, index = self._where(row)
        file, start = self._files[number], int(self._starts[number][index])
        return file, next(self._rows(file, start, index + 1))

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[tuple[TextFile, Row, dict[str, Any]]]:
        """Yield the epoch's rows, each with its file and its mark: a position in the order, or in a file."""
        return self._shuffled(epoch, mark) if self._shuffle else self.in_order(mark)

    def in_order(self, mark: dict[str, Any] | None) -> Iterator[tuple[TextFile, Row, dict[str, Any]]]:
        """Yield the rows as listed, each with its file and its mark: a position in a file."""
        at = mark or {"file": 0, "byte": 0, "line": 1}
        for number in range(at["file"], len(self._files)):
            file = self._files[number]
            for row in self._rows(file, at["byte"], at["line"]):
                yield file, row, {"file": number, "byte": row.byte, "line": row.line}
            at = {"byte": 0, "line": 1}

    def _rows(self, file: TextFile, byte: int, line: int) -> Iterator[Row]:
        """Yield the rows of a file from one on; at most `max_bytes` of a row are held in memory."""
        limit = self._max_bytes
        lines = self._lines.get(file.path)
        try:
            packed = not (lines or self._starts) and is_compressed(file.path)
            with open_plain(file.path) if packed else open(lines or file.path, "rb") as stream:
                stream.seek(byte)
                while data := stream.readline(limit + 2):
                    whole = data.endswith(b"\n") or len(data) < limit + 2
                    length = len(data) if whole else len(data) + _skip_line(stream)
                    require_unchanged(file.path, file.stamp, None if lines else stream.fileno())
                    content = data.rstrip(b"\r\n")
                    yield Row(byte, line, content if whole and len(content) <= limit else None)
                    byte, line = byte + length, line + 1
                # the end may be new
                require_unchanged(file.path, file.stamp, None if lines else stream.fileno())
        except OSError as error:
            unreadable(file.path, error)

    def _shuffled(
        self, epoch: int, mark: dict[str, Any] | None
    ) -> Iterator[tuple[TextFile, Row, dict[str, Any]]]:
        order = self.order(epoch)
        for document in range(mark["document"] if mark else 0, len(order)):
            yield *self.row(int(order[document])), {"document": document}


class BadRows:
    """Logs and counts bad rows or, with `strict`, ends the run at the first."""

    def __init__(self, *, strict: bool) -> None:
        self._strict, self._logged = strict, 0
        self.skipped = 0
        """Number of bad rows since this process began."""

    def skip(self, where: str, reason: BadRow) -> None:
        """Log a bad row and count it.

        Raises:
            EnvironmentProblem: with `strict`.
        """
        self.log(where, reason)
        self.skipped += 1
        self.count()

    def log(self, where: str, reason: BadRow) -> None:
        """Log a bad row.

        Raises:
            EnvironmentProblem: with `strict`.
        """
        if self._strict:
            raise EnvironmentProblem(
                f"{where}: {reason}",
                hint="fix the row, or set dataset.strict = false to skip such rows",
            )
        self._logged += 1
        if self._logged <= LOGGED:
            more = "; further skipped rows are only counted (bad_rows)" if self._logged == LOGGED else ""
            logger.warning("skipped a row: %s: %s%s", where, reason, more)

    def count(self) -> None:
        """Report the number of bad rows, if there are any."""
        if self.skipped:
            report("bad_rows", self.skipped, reduce="max")  # every rank reads all rows


class JsonLinesSource:
    """Documents from JSON Lines: a `titancli.data.source.Source`.

    Raises:
        EnvironmentProblem: a file cannot be read, all are empty, or, with `strict`, a row is not a document.
    """

    label = "dataset jsonl"

    def __init__(self, config: JsonLines, files: list[TextFile], seed: int) -> None:
        self._config = config
        found = corpus_identity(self.label, files, shuffle=config.shuffles_source, seed=seed, text=False)
        self.identity: dict[str, Any] = {**found, "key": config.text}
        self._rows = LineReader(
            files,
            shuffle=config.shuffles_source,
            seed=seed,
            max_bytes=config.max_bytes,
            skip_damaged=config.skip_damaged,
        )
        self._bad = BadRows(strict=config.strict)
        self.limits = {"strict": config.strict, "max_bytes": config.max_bytes}

    @property
    def skipped(self) -> int:
        """Return the number of bad rows since this process began."""
        return self._bad.skipped

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Piece]:
        """Yield the epoch's documents; a mark is a position in the order, or in a file."""
        for file, row, place in self._rows.read(epoch, mark):
            try:
                text = text_of(row.data, self._config)
            except BadRow as reason:
                self._bad.skip(self._rows.where(file, row), reason)
                continue
            self._bad.count()
            yield Piece(text, True, True, place)


def parse(data: bytes | None, max_bytes: int) -> dict[str, Any]:
    """Return a row's object.

    Raises:
        BadRow: the row is too long, empty, or not a JSON object.
    """
    if data is None:
        raise BadRow(f"it is longer than {max_bytes} bytes (dataset.max_bytes)")
    if not data.strip():
        raise BadRow("it is empty")
    try:
        row = json.loads(data.decode("utf-8-sig"))  # files may begin with a byte order mark
    except UnicodeDecodeError as error:
        raise BadRow(f"it is not UTF-8: byte {error.start} is invalid") from error
    except (ValueError, RecursionError) as error:
        raise BadRow(f"it is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRow(f"it is {type(row).__name__}, not an object")
    return row


def value_of(row: dict[str, Any], key: str) -> Any:
    """Return the value of a row's key.

    Raises:
        BadRow: the row does not have the key.
    """
    if key not in row:
        has = ", ".join(map(repr, row)) or "no keys"
        raise BadRow(f"it has no key {key!r}, only {has}"[:200])
    return row[key]


def check_characters(key: str, text: str) -> None:
    """Check that a text can be encoded: JSON can contain unpaired surrogates, which no tokenizer accepts.

    Raises:
        BadRow: it cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadRow(f"{key!r} contains {half}, an unpaired surrogate") from error


def text_of(data: bytes | None, config: JsonLines) -> str:
    """Return a row's document.

    Raises:
        BadRow: the row has none.
    """
    text = value_of(parse(data, config.max_bytes), config.text)
    if not isinstance(text, str):
        raise BadRow(f"{config.text!r} is {type(text).__name__}, not a string")
    if not text:
        raise BadRow(f"{config.text!r} is empty")
    check_characters(config.text, text)
    return text


def _is_compressed(file: TextFile) -> bool:
    try:
        return is_compressed(file.path)
    except OSError as error:
        unreadable(file.path, error)


def _skip_line(stream: BinaryIO) -> int:
    """Skip to the end of the line; return the number of bytes skipped."""
    length = 0
    while data := stream.readline(PIECE_BYTES):
        length += len(data)
        if data.endswith(b"\n"):
            break
    return length


def build(config: JsonLines, *, seed: int, **runtime: Any) -> Dataset:
    """Build `[dataset] type = "jsonl"`; a file listed twice is read once."""
    from titancli.data.text import text_dataset  # imports torch

    source = JsonLinesSource(config, files_of(config.paths), seed)
    return text_dataset(source, config, seed=seed, **runtime)
