"""Metrics as one table in a CSV file."""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.files import csv_text, regular
from titancli.loggers import CSV
from titancli.runs import timestamp

FIRST = ["step", "time"]


class CsvLogger:
    """Appends a row for each logged step.

    The table is written anew when a metric appears that has no column yet, and when a run starts or resumes:
    then rows after that step are dropped, as is a last line that is not whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}
        """The last row."""
        self._end = 0
        """Its start in the file."""

    def run_start(self, info: dict[str, Any]) -> None:
        """
        Raises:
            EnvironmentProblem: the file is not such a table.
        """
        self._rewrite(FIRST, up_to=int(info.get("step") or 0))

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        metrics = {csv_text(name): value for name, value in metrics.items()}
        row = {"step": step, "time": timestamp(), **metrics}
        again = self._last.get("step") == step  # an evaluation after a step that was logged
        row = {**row, **self._last, **metrics} if again else row
        if not self._columns or not row.keys() <= set(self._columns):
            self._rewrite([*FIRST, *metrics], up_to=step - 1)
        elif again:
            os.truncate(self._path, self._end)
        self._append([row.get(name, "") for name in self._columns])
        self._last = row

    def _rewrite(self, columns: Sequence[str], up_to: int) -> None:
        """Write the table with the columns it has and these; readers see the old one or the new."""
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            with (
                open(self._path, "a+", newline="", encoding="utf-8", errors="replace", opener=regular) as old,
                open(temporary, "w", newline="", encoding="utf-8", opener=regular) as new,
            ):
                old.seek(0)
                rows = csv.reader(old)
                header = next(rows, [])
                if header and header[: len(FIRST)] != FIRST:
                    raise EnvironmentProblem(f"{self._path} is not a table of metrics: it is left as it is")
                # A table of an earlier version has names as they are.
                header = [name if name.startswith("'") else csv_text(name) for name in header]
                self._columns = list(dict.fromkeys([*header, *columns]))
                new.write(_line(self._columns))
                for row in rows:
                    if len(row) == len(header) and row[0].isdecimal() and int(row[0]) <= up_to:
                        new.write(_line([*row, *[""] * (len(self._columns) - len(row))]))
            os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def _append(self, row: Sequence[Any]) -> None:
        """Append a whole row or, on a full disk, nothing."""
        data = _line(row).encode()
        with open(self._path, "ab", buffering=0, opener=regular) as file:
            self._end = end = file.tell()
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                file.truncate(end)
                raise


def _line(row: Sequence[Any]) -> str:
    """Return a row as a line that ends with `\\n`."""
    text = io.StringIO()
    csv.writer(text).writerow(row)  # with the end \r\n, it quotes cells with either
    return text.getvalue().removesuffix("\r\n") + "\n"


def build(config: CSV, *, run_folder: Path, is_main: bool) -> Any:
    """Return a CsvLogger on rank 0; elsewhere a logger without methods."""
    return CsvLogger(run_folder / config.file) if is_main else object()
