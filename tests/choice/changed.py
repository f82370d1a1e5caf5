"""The tests that a change can break: those that ran a function, when they were last measured, that is another
one now."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.choice.reading import ROOT, Function, Functions, Measured

SCHEMA = """
create table if not exists test (id integer primary key, name text unique, cpu real);
create table if not exists function (
    id integer primary key, file text, name text, text text, unique (file, name, text)
);
create table if not exists ran (test integer, function integer, primary key (test, function)) without rowid;
"""
UNKNOWN = Function("", "", "")
"""Stands for all that a test may run: always another one now."""


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA)
        yield database


def remember(path: Path, tests: Iterable[Measured]) -> None:
    """Write down which functions tests ran, in place of what they ran before. One that failed is unknown
    until it passes: it may run more than it came to."""
    functions = Functions()
    with _opened(path) as database:
        for test in tests:
            database.execute("insert or replace into test (name, cpu) values (?, ?)", (test.name, test.cpu))
            (number,) = database.execute("select id from test where name = ?", (test.name,)).fetchone()
            for function in _ran(test, functions) if test.passed else {UNKNOWN}:
                row = (function.file, function.name, function.text)
                database.execute("insert or ignore into function (file, name, text) values (?, ?, ?)", row)
                database.execute(
                    "insert into ran select ?, id from function where file = ? and name = ? and text = ?",
                    (number, *row),
                )
        database.execute("delete from ran where test not in (select id from test)")


def _ran(test: Measured, functions: Functions) -> set[Function]:
    """Return the functions that a test ran, and of each of their files what is outside of functions."""
    places = {(file, functions.at(file, abs(line))) for file, *lines in test.branches for line in lines}
    places |= {(file, "") for file, _ in places}
    return {found for file, name in places if (found := functions.of(file).get(name))}


def affected(path: Path) -> tuple[list[str], list[str]]:
    """Return the tests that what was edited since they were measured can break, the cheapest first, with the
    test files that are new; and the edited files that no measurement knows, as what depends on those is not
    known."""
    functions = Functions()
    with _opened(path) as database:
        other = [
            (number,)
            for number, *row in database.execute("select id, file, name, text from function")
            if functions.of(row[0]).get(row[1]) != Function(*row)
        ]
        database.execute("create temporary table other (id integer primary key)")
        database.executemany("insert into other values (?)", other)
        tests = database.execute(
            "select distinct test.name from test join ran on ran.test = test.id"
            " join other on other.id = ran.function order by test.cpu"
        )
        found = [name for (name,) in tests if (ROOT / name.partition("::")[0]).exists()]
        known = {file for (file,) in database.execute("select distinct file from function")}
    edited = [file for file in _edited() if file not in known]
    new = [file for file in edited if Path(file).match("test_*.py") and (ROOT / file).exists()]
    return found + new, [file for file in edited if file not in new]


def _edited() -> list[str]:
    """Return the files that differ from the last commit, new ones included."""
    command = ["git", "status", "--porcelain", "--no-renames", "-z", "--untracked-files=all"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [entry[3:] for entry in listed.split("\0") if entry]
