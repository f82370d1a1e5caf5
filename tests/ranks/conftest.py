"""The tables of the same-answer suite and of "raise, then go on", at the end of pytest's output."""

from __future__ import annotations

from typing import Any

from tests.ranks.comparison import Row, table
from tests.ranks.raising import Outcome, raised_table

ROWS: list[Row] = []
RAISED: dict[str, list[Outcome]] = {}
"""By layout."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if ROWS:
        terminalreporter.section("same answer: largest relative differences from one rank")
        for line in table(ROWS):
            terminalreporter.write_line(line)
    if RAISED:
        terminalreporter.section("raise, then go on: the clean step after it, against an engine unharmed")
        for line in raised_table(RAISED):
            terminalreporter.write_line(line)
