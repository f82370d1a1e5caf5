"""A dataset that takes its time for each row, as a plugin file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge

from titancli import Batch, component, hookimpl
from titancli.observe.metrics import report


@component("dataset", "slow", target=f"{__name__}:Dataset")
class Slow:
    """Rows of one number each, slowly; at row `at` it ends, or something happens."""

    seconds: Annotated[float, Ge(0)] = 0.0
    """Of each row."""
    at: int | None = None
    then: Literal["end", "raise", "die"] = "end"
    differs: bool = False
    """Whether each rank has data of its own."""


class Dataset:
    """See `Slow`."""

    def __init__(self, config: Any, *, seq_len: int, rows: int, dp_rank: int, dp_size: int, **_: Any) -> None:
        self._config, self._seq_len, self._rows = config, seq_len, rows
        self._dp_rank, self._dp_size, self._next = dp_rank, dp_size, 0

    def __iter__(self) -> Iterator[Batch]:
        while self._config.then != "end" or self._config.at is None or self._next < self._config.at:
            first = self._next + self._dp_rank * self._rows
            rows = torch.stack([self._row(number) for number in range(first, first + self._rows)])
            self._next += self._rows * self._dp_size
            report("read_rows", self._rows, reduce="sum")
            positions = torch.arange(self._seq_len).repeat(self._rows, 1)
            yield Batch({"tokens": rows, "targets": rows, "positions": positions})

    def _row(self, number: int) -> torch.Tensor:
        time.sleep(self._config.seconds)
        if number == self._config.at and self._config.then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self._config.at and self._config.then == "raise":
            raise LookupError(f"there is no row {number}")
        return torch.full((self._seq_len,), number % 256)

    def skip(self, rows: int) -> int:
        if self._config.then == "end" and self._config.at is not None:
            rows = max(0, min(rows, self._config.at - self._next))
        self._next += rows
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"row": self._next, **({"data": {"of rank": self._dp_rank}} if self._config.differs else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["row"]


@hookimpl
def titan_components() -> list[type]:
    return [Slow]
