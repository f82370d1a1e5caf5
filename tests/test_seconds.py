"""No test asserts that something takes fewer than so many seconds: it would fail on a slower machine.

CPU time is compared with that of other work in the same process (`tests.yardstick`), and what must not hang
with the name of what it would wait for; how fast something is belongs to benchmarks/.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py"), ROOT / "conftest.py"]
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time", "ru_utime", "ru_stime"}
WORDS = ("seconds", "elapsed", "duration")


def upper_bounds(source: str) -> Iterator[int]:
    """Yield the lines of asserts that compare a time with a number that it must stay below."""
    tree = ast.parse(source)
    times = set[str]()
    while found := _names_of_times(tree, times) - times:
        times |= found
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assert):
            continue
        for compared in (one for one in ast.walk(node.test) if isinstance(one, ast.Compare)):
            terms = [compared.left, *compared.comparators]
            for left, sign, right in zip(terms, compared.ops, terms[1:], strict=False):
                low, high = (left, right) if isinstance(sign, ast.Lt | ast.LtE) else (right, left)
                ordered = isinstance(sign, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
                if ordered and _is_number(high) and _is_time(low, times):
                    yield node.lineno


def _names_of_times(tree: ast.Module, times: set[str]) -> set[str]:
    """Return the variables that get a time, and the functions that return one."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_time(node.value, times):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef):
            returned = (one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value)
            if any(_is_time(value, times) for value in returned if isinstance(value, ast.BinOp | ast.Name)):
                found.add(node.name)
    return found


def _is_time(value: ast.expr, times: set[str]) -> bool:
    for node in ast.walk(value):
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS:
            return not isinstance(value, ast.Compare)
        if isinstance(node, ast.Name) and (node.id in times or node.id in WORDS):
            return not _is_ratio(value)
        if isinstance(node, ast.Constant) and node.value in WORDS:
            return True
    return False


def _is_ratio(value: ast.expr) -> bool:
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)


def _is_number(value: ast.expr) -> bool:
    return all(
        isinstance(node, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop)
        for node in ast.walk(value)
    )


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("began = time.monotonic()\nassert time.monotonic() - began < 5", [2]),
        ("took = time.process_time() - began\nassert took < 0.002 * 3", [2]),
        (
            "def cost():\n    return time.process_time() - began\nassert 8 > min(cost() for _ in range(3))",
            [3],
        ),
        ("assert 0.5 < seconds < 30 and x", [1]),
        ('assert found["seconds"] <= 8', [1]),
        ("end = time.monotonic() + 60\nassert time.monotonic() < end", []),
        ("took = time.monotonic() - began\nassert took < PATIENCE and took >= 1.0", []),
        ("assert cpu_seconds(one) < 8 * cpu_seconds(other)", []),
        ("assert len(rows) < 5", []),
    ],
)
def test_upper_bounds_are_found(source: str, lines: list[int]) -> None:
    assert list(upper_bounds(source)) == lines


def test_no_test_asserts_seconds() -> None:
    found = [f"{path.relative_to(ROOT)}:{n}" for path in FILES for n in upper_bounds(path.read_text())]
    assert not found
