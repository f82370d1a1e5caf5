"""Tables of test cases of which some are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rows(table: Iterable[Any], *, slow: Collection[Any]) -> list[Any]:
    """Return the table for `parametrize`, with the mark `slow` on those rows.

    A row that is a tuple has a value for each argument.

    Raises:
        ValueError: a slow row that is not in the table.
    """
    table = list(table)
    if missing := [row for row in slow if row not in table]:
        raise ValueError(f"not in the table: {missing}")
    return [pytest.param(*_values(row), marks=pytest.mark.slow) if row in slow else row for row in table]


def _values(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)
