"""Ask whether the tests that stay notice what all tests notice: small faults in titan, one at a time.

Each fault is put into a copy of the repository. First the tests that stay and run its line are tried, the
cheapest first, until one fails; if none does, those that were left out.
"""

from __future__ import annotations

import ast
import os
import queue
import random
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.choice.reading import ROOT, Functions, Measured

FIRST = 80
"""So many tests are tried before all others: most faults are noticed by one of them."""
LONGEST = 1200.0
"""Seconds after which tests with a fault in them are taken to hang."""
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.BitOr: "&",
    ast.And: "or",
    ast.Or: "and",
}


@dataclass(frozen=True)
class Fault:
    """A piece of a file, and what stands there instead."""

    file: str
    line: int
    begin: int
    """Offset in bytes."""
    end: int
    new: str

    def put_into(self, source: bytes) -> bytes:
        return source[: self.begin] + self.new.encode() + source[self.end :]

    def shown(self, source: bytes) -> str:
        """Return both lines as a diff has them."""
        old, new = (
            text.decode().splitlines()[self.line - 1].strip() for text in (source, self.put_into(source))
        )
        return f"- {old}\n+ {new}"


def faults(file: str, source: bytes) -> Iterator[Fault]:
    """Every fault that can be put into a file: another comparison, operator, constant or condition, an inner
    call that is not made, a value that is not returned."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.expr, right: ast.expr, new: str) -> Fault:
        (_, begin), (end, _) = at(left), at(right)
        old = source[begin:end].decode()
        word = old.strip(" ()\n\\")
        begin += old.index(word) if word in old else 0
        return Fault(file, left.end_lineno or 0, begin, begin + len(word), new)

    def within(node: ast.expr | ast.stmt, new: str) -> Fault:
        return Fault(file, node.lineno, *at(node), new)

    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    kinds = {id(part) for node in ast.walk(tree) for part in _annotations(node)}
    for node in ast.walk(tree):
        if id(node) in texts or id(node) in kinds:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            yield between(node.left, node.comparators[0], SWAPS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            if not isinstance(node.left, ast.Constant | ast.JoinedStr) or isinstance(node.op, ast.Mult):
                yield between(node.left, node.right, SWAPS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            yield between(node.values[0], node.values[1], SWAPS[type(node.op)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield within(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield within(node, str(node.value + 1))
        elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare):
            if ast.unparse(node.test) != "TYPE_CHECKING":
                yield within(node.test, f"(not ({ast.unparse(node.test)}))")
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield within(node, "return None")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield within(node, "pass")


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("annotation", "returns"):
        if (part := getattr(node, name, None)) is not None:
            yield from ast.walk(part)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def drawn(root: Path, lines: dict[str, set[int]], count: int, seed: int) -> list[Fault]:
    """Draw so many faults out of all those on lines that some test runs, in titan and its plugins."""
    every = [
        fault
        for file in sorted(lines)
        for fault in faults(file, (root / file).read_bytes())
        if fault.line in lines[file]
    ]
    return random.Random(seed).sample(every, count)


def noticed(root: Path, fault: Fault, tests: Sequence[str], timeout: float = LONGEST) -> str | None:
    """Return the first of the tests that fails with the fault in `root`, a copy for this alone; or what else
    ended them (they did not start, or took too long)."""
    if not tests:
        return None
    path = root / fault.file
    source = path.read_bytes()
    path.write_bytes(fault.put_into(source))
    os.utime(path, (time.time(), time.time() + random.random()))  # or what was compiled before is taken
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
            names.write("\n".join(tests))
            names.flush()
            command = [
                str(root / ".venv/bin/python"),
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                "-x",
                "-q",
                "-rfE",
            ]
            done = subprocess.run(
                [*command, "--timeout=120", f"@{names.name}"],
                cwd=root,
                capture_output=True,
                text=True,
                timeout=timeout,
                env={name: text for name, text in os.environ.items() if name != "COVERAGE_PROCESS_START"},
            )
    except subprocess.TimeoutExpired:
        return f"not done in {timeout:.0f} s"
    finally:
        path.write_bytes(source)
        os.utime(path, None)
    if done.returncode == 0:
        return None
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].split(" - ")[0]
    return f"ended with {done.returncode}: {(done.stdout + done.stderr).strip().splitlines()[-1:]}"


class Row(NamedTuple):
    """A fault, and which tests noticed it."""

    file: str
    line: int
    change: str
    tests: int
    """How many run its line."""
    by: str
    """`make test`, `make test-all`, or `no test`."""
    first: str | None
    """The test that failed."""
    seconds: float


def lines_of(tests: Iterable[Measured]) -> dict[str, set[int]]:
    """Return the lines of titan and its plugins that some test runs, inside of functions."""
    functions = Functions()
    found: dict[str, set[int]] = defaultdict(set)
    for test in tests:
        for file, _, line in test.branches:
            if line > 0 and not file.startswith("tests/") and functions.at(file, line):
                found[file].add(line)
    return dict(found)


def run(
    drawn: Sequence[Fault], tests: Mapping[str, Measured], left_out: set[str], copies: Sequence[Path]
) -> Iterator[Row]:
    """Try each fault in one of the copies, several at once; the rows come as they are done."""
    free: queue.Queue[Path] = queue.Queue()
    for copy in copies:
        free.put(copy)
    size = {name: len(test.branches) for name, test in tests.items()}

    def one(fault: Fault) -> Row:
        root, began = free.get(), time.perf_counter()
        try:
            over = [
                n
                for n, test in tests.items()
                if any((f, abs(to)) == (fault.file, fault.line) for f, _, to in test.branches)
            ]
            # What is cheap and runs little else is most likely to be about this line.
            over.sort(key=lambda name: (tests[name].cpu + 0.5) * size[name])
            stay = [name for name in over if name not in left_out]
            by, first = "make test", noticed(root, fault, stay[:FIRST]) or noticed(root, fault, stay[FIRST:])
            if first is None:
                by, first = "make test-all", noticed(root, fault, [name for name in over if name in left_out])
            if first is None:
                by = "no test"
            source = (ROOT / fault.file).read_bytes()
            seconds = time.perf_counter() - began
            return Row(fault.file, fault.line, fault.shown(source), len(over), by, first, round(seconds, 1))
        finally:
            free.put(root)

    with ThreadPoolExecutor(len(copies)) as pool:
        for done in as_completed(pool.submit(one, fault) for fault in drawn):
            yield done.result()
