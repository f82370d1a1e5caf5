"""Choose the tests of `make test` by what each runs and costs, and write down those that are left out.

A test is left out only if every branch that it runs is run by others that stay, if each fault of the matrix
and each feature of a layout keeps a test, and each test function a case.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.choice.reading import ROOT, Functions, Measured, inside

NIGHTLY = ROOT / "tests/nightly.txt"
ABSENT = pytest.StashKey[set[str]]()
"""In pytest's config: which of them are not in their files."""
CHEAP = 0.5
"""CPU-seconds below which a test stays: it costs little, and may ask what no branch shows."""
HEAD = """\
# Tests that `make test` leaves to `make test-all`, a line each: all that they run is run by others too.
# Chosen by `python -m tests.choice choose` from a measured run of all tests; tests/choice says how.
"""


def questions(tests: Iterable[str]) -> dict[str, set[object]]:
    """Return what must keep a test, whatever branches say: a row of the fault matrix, a feature of a layout,
    a test function."""
    from tests.faults.test_matrix import MATRIX
    from tests.ranks.layouts import LAYOUTS
    from tests.ranks.test_same_answer import features

    rows: dict[str, set[object]] = {}
    for number, row in MATRIX.items():
        for name in (*row.tests, *row.on_nodes):
            rows.setdefault(f"tests/{name}", set()).add(f"fault {number}")
    asked: dict[str, set[object]] = {}
    for test in tests:
        function, _, case = test.partition("[")
        asked[test] = {function} | rows.get(function, set())
        if function.endswith("test_every_layout_gives_the_answer_of_one_rank"):
            asked[test] |= set(features(LAYOUTS[case[:-1]].layout))
    return asked


def choose(tests: Mapping[str, Measured], asked: Mapping[str, set[object]], cheap: float = CHEAP) -> set[str]:
    """Return the names of the tests that stay: those that cost little, and of the others the cheapest that
    together run and ask whatever is run and asked by any (greedily: the most that is new for a second)."""
    functions = Functions()
    covers = {name: inside(test.branches, functions) | asked[name] for name, test in tests.items()}
    stay = {name for name, test in tests.items() if not test.slow and (test.cpu < cheap or not test.passed)}
    missing = set().union(*covers.values()) - set().union(*(covers[name] for name in stay))
    queue = [(float("-inf"), name) for name in tests if name not in stay]
    heapq.heapify(queue)
    while missing and queue:
        _, name = heapq.heappop(queue)
        if not (new := len(covers[name] & missing)):
            continue
        worth = -new / max(tests[name].cpu, 0.01)
        if queue and worth > queue[0][0]:  # what is new of it has become less: others may be worth more
            heapq.heappush(queue, (worth, name))
            continue
        stay.add(name)
        missing -= covers[name]
    return stay


def write(left_out: Iterable[str], path: Path = NIGHTLY) -> None:
    path.write_text(HEAD + "".join(f"{name}\n" for name in sorted(left_out)))


def nightly(path: Path = NIGHTLY) -> set[str]:
    """Return the tests that are left to `make test-all`."""
    return {line for line in path.read_text().splitlines() if line and not line.startswith("#")}
