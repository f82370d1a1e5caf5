"""Which tests `make test` runs, and how that is chosen: by what each test runs and what it costs.

`python -m tests.choice record` runs tests with coverage.py in each of their processes, `choose` writes
`tests/nightly.txt` from that, `mutants` asks whether the tests that stay notice what all tests notice, and
`changed` runs those that what was edited can break.

Here is what a process of the tests needs to be measured, nothing where they are not. It finds the name of its
test in `PYTEST_CURRENT_TEST`; one that outlives a test (`tests/ranks`) is given it with each piece of work.
"""

from __future__ import annotations

import os
from typing import Any

START = "COVERAGE_PROCESS_START"
TEST = "PYTEST_CURRENT_TEST"


def environment() -> dict[str, str]:
    """Return what a process needs to be measured, whatever else its environment is."""
    return {name: os.environ.get(name, "") for name in (START, TEST)} if os.environ.get(START) else {}


def begin() -> None:
    """Begin to measure a process that has been forked; its environment is the new one."""
    if os.environ.get(START):
        import coverage

        coverage.process_startup(force=True)


def now(test: str) -> None:
    """Have what this process runs from here on belong to a test."""
    if os.environ.get(START):
        import coverage

        current: Any = coverage.Coverage.current()
        current.switch_context(test)
