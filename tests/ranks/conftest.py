"""The table of the same-answer suite, at the end of pytest's output."""

from __future__ import annotations

from typing import Any

from tests.ranks.comparison import Row, table

ROWS: list[Row] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if ROWS:
        terminalreporter.section("same answer: largest relative differences from one rank")
        for line in table(ROWS):
            terminalreporter.write_line(line)
