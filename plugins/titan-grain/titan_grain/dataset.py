"""Rows from a `grain.MapDataset`, which reads each of them by its index.

So the position is an index too, a rank reads only its own rows, and others are skipped without being read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grain
import numpy as np
import torch

from titan_grain import Grain
from titancli import Batch, report
from titancli.data.files import corpus_identity, files_of
from titancli.data.packing import STATE_VERSION, refuse_other_data, tokenizer_identity
from titancli.errors import EnvironmentProblem
from titancli.protocols import Tokenizer
from titancli.protocols.batch import IGNORE

LABEL = "dataset grain"


class GrainDataset:
    """Batches of rows: the `Dataset` of `titancli.protocols`.

    Raises:
        EnvironmentProblem: a file is missing, or Grain cannot read it.
    """

    def __init__(
        self,
        config: Grain,
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        rows: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
    ) -> None:
        self._config, self._tokenizer, self._seq_len = config, tokenizer, seq_len
        self._rows, self._dp_rank, self._dp_size, self._next = rows, dp_rank, dp_size, 0
        files = files_of(config.paths)
        identity = corpus_identity(LABEL, files, shuffle=config.shuffle, seed=seed, text=False)
        self._identity = {**identity, "records": config.records, "tokenizer": tokenizer_identity(tokenizer)}
        try:
            records = grain.MapDataset.source(
                grain.sources.ArrayRecordDataSource([file.path for file in files])
            )
            self._per_epoch = len(records)
        except Exception as error:  # any error of the file system or Grain
            raise _unreadable(files[0].path, error) from error
        if not self._per_epoch:
            raise EnvironmentProblem(f"{LABEL}: the files have no records", hint="use files with records")
        if config.shuffle:
            records = records.seed(seed % 2**32).shuffle()
        self._records = records.repeat() if config.repeat else records

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the current position on; without `repeat` the last is padded with empty rows.

        Raises:
            EnvironmentProblem: a record cannot be read, or does not contain text or ids.
        """
        while self._next < len(self._records):
            first = self._next + self._dp_rank * self._rows
            ids = np.full((self._rows, self._seq_len + 1), self._tokenizer.eos_id, np.int64)
            targets = np.full((self._rows, self._seq_len), IGNORE, np.int64)
            for row, number in enumerate(range(first, min(first + self._rows, len(self._records)))):
                found = self._ids(number)[: self._seq_len + 1]
                ids[row, : len(found)] = found
                targets[row, : max(0, len(found) - 1)] = found[1:]
            self._next += self._rows * self._dp_size
            yield Batch(
                {
                    "tokens": torch.from_numpy(ids[:, :-1].copy()),
                    "targets": torch.from_numpy(targets),
                    "positions": torch.arange(self._seq_len).repeat(self._rows, 1),
                }
            )

    def _ids(self, number: int) -> np.ndarray:
        """Return the ids of a row by its index over all epochs; texts have their end marker."""
        try:
            record = self._records[number]
            if self._config.records == "text":
                found = np.array([*self._tokenizer.encode(record.decode()), self._tokenizer.eos_id], np.int64)
            else:
                found = np.frombuffer(record, f"<u{np.dtype(self._config.records).itemsize}").astype(np.int64)
        except Exception as error:  # an error of Grain, invalid UTF-8, or incomplete ids
            where = f"row {number % self._per_epoch:,} of epoch {number // self._per_epoch}"
            raise _unreadable(where, error) from error
        if len(found) > self._seq_len + 1:
            report("grain_cut_rows", 1, reduce="sum")
        return found

    def skip(self, rows: int) -> int:
        """Skip this many global rows without reading them; return how many were skipped."""
        rows = min(rows, max(0, len(self._records) - self._next))
        self._next += rows
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, the same on every rank: `row` counts over all epochs."""
        epoch = self._next // self._per_epoch
        return {"version": STATE_VERSION, "epoch": epoch, "row": self._next, "data": dict(self._identity)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, with any number of ranks and rows.

        Raises:
            EnvironmentProblem: the state was saved with other data, or does not belong to this dataset.
        """
        refuse_other_data(state, self._identity, LABEL, "row")
        self._next = state["row"]


def _unreadable(what: str, error: Exception) -> EnvironmentProblem:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return EnvironmentProblem(
        f"{LABEL}: {what} cannot be read: {reason}", hint="check dataset.paths and dataset.records"
    )
