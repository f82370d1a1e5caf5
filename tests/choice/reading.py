"""What a measured run of the tests says: what each test cost, and which branches and functions it ran."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
Branch = tuple[str, int, int]
"""A file, and the lines from which and to which a jump goes, as coverage.py numbers them."""


@dataclass
class Measured:
    """One test: what it cost, and what it ran in all of its processes."""

    name: str
    cpu: float
    """CPU-seconds of all its processes; with coverage.py beside them, so more than without."""
    slow: bool
    passed: bool = True
    branches: set[Branch] = field(default_factory=set)

    def lines(self) -> set[tuple[str, int]]:
        return {(file, line) for file, _, line in self.branches if line > 0}


def read(folder: Path) -> dict[str, Measured]:
    """Read what a run left in a folder: `costs/` of `tests.choice.costs`, `data/` of coverage.py."""
    tests: dict[str, Measured] = {}
    unlike = set()
    for path in sorted((folder / "costs").glob("*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if "cpu" in row:
                tests[row["test"]] = Measured(row["test"], row["cpu"], row["slow"])
            else:
                unlike.add(row["test"])
    for name in unlike & tests.keys():
        tests[name].passed = False
    same: dict[Branch, Branch] = {}
    torn = 0
    for path in (folder / "data").iterdir():
        try:
            for name, branch in _branches(path):
                if name in tests:
                    tests[name].branches.add(same.setdefault(branch, branch))
        except sqlite3.DatabaseError:
            torn += 1
    if torn:
        print(f"{torn} processes were killed while they wrote what they had run", file=sys.stderr)
    return tests


def _branches(path: Path) -> Iterator[tuple[str, Branch]]:
    """What the file of one process has: each branch, and the test that it belongs to."""
    # No public call of coverage.py hands out the branches of each context in one pass.
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        contexts = {
            number: owner(name) for number, name in database.execute("select id, context from context")
        }
        # A process in another folder has them with their whole paths.
        prefix = f"{ROOT}/"
        files = {
            number: file.removeprefix(prefix)
            for number, file in database.execute("select id, path from file")
        }
        for context, file, begin, end in database.execute(
            "select context_id, file_id, fromno, tono from arc"
        ):
            yield contexts[context], (files[file], begin, end)


def owner(context: str) -> str:
    """Return the test that a context belongs to, without its phase: the one that a process was given last,
    not the one that started it."""
    return re.sub(r" \((setup|call|teardown)\)$", "", context.rpartition("|")[2])


# ----------------------------------------------------------------------------------------------- functions


@dataclass(frozen=True)
class Function:
    """A function of a file, and a hash of its text; with no name, what the file has outside of functions."""

    file: str
    name: str
    text: str


class Functions:
    """The functions of the source files below a root, as they are now."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._known: dict[str, tuple[dict[int, str], dict[str, Function]]] = {}

    def of(self, file: str) -> dict[str, Function]:
        """Return those of a file by their names; none of one that is not there, or is no Python."""
        return self._file(file)[1]

    def at(self, file: str, line: int) -> str:
        """Return the name of the function that a line is in, the innermost; no name outside of all."""
        return self._file(file)[0].get(line, "")

    def _file(self, file: str) -> tuple[dict[int, str], dict[str, Function]]:
        if file not in self._known:
            try:
                self._known[file] = _functions(file, (self._root / file).read_text())
            except (OSError, SyntaxError):
                self._known[file] = {}, {}
        return self._known[file]


def _functions(file: str, source: str) -> tuple[dict[int, str], dict[str, Function]]:
    """Which function each line is in, and each function. A change of a comment is none."""
    tree = ast.parse(source)
    lines: dict[int, str] = {}
    texts: dict[str, list[str]] = defaultdict(list)

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{name}.{child.name}".lstrip(".")
                body = child.body[0].lineno
                lines.update(dict.fromkeys(range(body, (child.end_lineno or body) + 1), inner))
                walk(child, inner)
                texts[inner].append(ast.dump(child))
                child.body = []  # its head belongs to what is around it, too
            elif isinstance(child, ast.ClassDef):
                walk(child, f"{name}.{child.name}".lstrip("."))
            else:
                walk(child, name)

    walk(tree, "")
    texts[""].append(ast.dump(tree))
    return lines, {
        name: Function(file, name, hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16])
        for name, parts in texts.items()
    }


def inside(branches: Iterable[Branch], functions: Functions) -> set[Branch]:
    """Return those that are inside functions: what a module runs when it is imported says nothing of the test
    that imported it first."""
    return {
        branch
        for branch in branches
        if functions.at(branch[0], abs(branch[2])) or functions.at(branch[0], abs(branch[1]))
    }
