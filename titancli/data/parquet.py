"""A source of Parquet files: each row is a document. One row group is read at a time.

Shuffling permutes the row groups and the rows within each, since a Parquet file cannot be read row by row.
Torch-free until a dataset is built.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from titancli.data import Parquet
from titancli.data.compressed import largest, too_large
from titancli.data.files import TextFile, corpus_identity, files_of
from titancli.data.parquet_file import open_parquet, require_harmless, try_parquet, written_out
from titancli.data.source import Piece, Size, document_order
from titancli.data.unchanged import require_unchanged
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols import Dataset


class ParquetSource:
    """Documents of Parquet files: a `titancli.data.source.Source`. A row without text is an empty document.

    Raises:
        EnvironmentProblem: a file cannot be read, or is not a Parquet file.
        RecipeError: a file has no column of this name, or the column is not text.
    """

    label = "dataset parquet"

    def __init__(self, config: Parquet, files: list[TextFile], seed: int) -> None:
        self._files, self._column, self._shuffle, self._seed = (
            files,
            config.text,
            config.shuffles_source,
            seed,
        )
        found = corpus_identity(self.label, files, shuffle=self._shuffle, seed=seed, text=False)
        self.identity: dict[str, Any] = {**found, "column": config.text}
        try_parquet(file.path for file in files)
        counts = [row_groups(file, config.text) for file in files]
        self._firsts = np.cumsum([0, *(len(rows) for rows in counts)])
        """Index of the first row group of each file, then the total."""
        self._rows = np.array([rows for of_file in counts for rows in of_file], np.int64)
        """Rows of each row group."""
        self.size = Size(int(self._rows.sum()), "documents")

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Piece]:
        """Yield the epoch's documents; a mark is a row group's position in the order, and a row's within
        it."""
        at = mark or {"group": 0, "row": 0}
        groups = self._groups_of(epoch)
        first = at["row"]
        for place in range(at["group"], len(groups)):
            number = int(groups[place])
            texts = self._column_of(number)
            order = self._order(epoch, number, len(texts))
            for row in range(first, len(texts)):
                yield Piece(texts[int(order[row])].as_py() or "", True, True, {"group": place, "row": row})
            first = 0

    def progress(self, mark: dict[str, Any]) -> float:
        """Return the fraction of the row groups before a mark."""
        return mark["group"] / int(self._firsts[-1])

    def _groups_of(self, epoch: int) -> np.ndarray:
        """Return the row groups in the order of an epoch."""
        return document_order(self._seed, epoch, len(self._rows), shuffle=self._shuffle)

    def _order(self, epoch: int, group: int, count: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(count)
        words = [part & 0xFFFFFFFF for part in (self._seed, self._seed >> 32, epoch, group)]
        return np.random.RandomState(words).permutation(count)

    def _column_of(self, group: int) -> Any:
        import pyarrow as pa

        number = int(np.searchsorted(self._firsts, group, side="right")) - 1
        file = self._files[number]
        try:
            with open_parquet(file.path) as opened:
                table = opened.read_row_group(group - int(self._firsts[number]), columns=[self._column])
            if written_out(table) > (limit := largest(file.size)):
                raise too_large(file.path, limit)
            require_unchanged(file.path, file.stamp)
        except (OSError, UnicodeEncodeError, pa.ArrowException) as error:
            if os.path.exists(file.path):  # an outdated footer causes an error too
                require_unchanged(file.path, file.stamp)
            _unreadable(file, error)
        return table.column(0)


def row_groups(file: TextFile, column: str) -> list[int]:
    """Return the number of rows in each row group of a file.

    Raises:
        EnvironmentProblem: the file cannot be read, or has changed.
        RecipeError: it has no such column, or the column is not text.
    """
    import pyarrow as pa

    schema, metadata = footer(file)
    if column not in schema.names:
        raise RecipeError(
            f"{file.path} has no column {column!r}",
            hint=f"dataset.text may be one of: {', '.join(schema.names)}",
        )
    kind = schema.field(column).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(is_text(values) for is_text in (pa.types.is_string, pa.types.is_large_string)):
        raise RecipeError(f"{file.path}: column {column!r} has the type {kind}, which is not text")
    return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


def footer(file: TextFile) -> tuple[Any, Any]:
    """Return the Arrow schema and the metadata of a file.

    Raises:
        EnvironmentProblem: it cannot be read, or has changed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        require_harmless(file.path)
        with pq.ParquetFile(file.path) as opened:
            found = opened.schema_arrow, opened.metadata
        require_unchanged(file.path, file.stamp)
    except (OSError, UnicodeEncodeError, pa.ArrowException) as error:
        _unreadable(file, error)
    return found


def _unreadable(file: TextFile, error: Exception) -> NoReturn:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    reason = next(iter(text.strip().splitlines()), type(error).__name__)
    raise EnvironmentProblem(
        f"cannot read the Parquet file {file.path}: {reason}",
        hint="restore it, or remove it from the paths of the dataset",
    ) from error


def build(config: Parquet, *, seed: int, **runtime: Any) -> Dataset:
    """Build `[dataset] type = "parquet"`; a file listed twice is read once."""
    from titancli.data.text import text_dataset  # imports torch

    source = ParquetSource(config, files_of(config.paths), seed)
    return text_dataset(source, config, seed=seed, **runtime)
