"""Collected where torch runs on the null device alone: `make test-null-gpu`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.null_gpu import table
from tests.null_gpu.device import LIBRARY, numbers

collect_ignore_glob = [] if LIBRARY.exists() else ["test_*.py"]
os.environ["TRITON_LIBCUDA_PATH"] = str(LIBRARY.parent)


@pytest.fixture(autouse=True)
def kept_numbers() -> Iterator[None]:
    yield
    numbers("kept")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if table.ROWS:
        terminalreporter.section("recipes on a device whose kernels do nothing")
        for line in table.lines():
            terminalreporter.write_line(line)
