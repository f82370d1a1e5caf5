"""No door without a row, and no row without its tests."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests import absent
from tests.run.conftest import trained
from tests.security.doors import DOORS, ENVIRONMENT, Door

ROOT = Path(__file__).parents[2]
NAMES = {"read_text", "read_bytes", "read_json", "read_file", "fromfile", "memmap", "frombuffer", "safe_open"}
NAMES |= {
    "open",
    "open_code",
    "fdopen",
    "socket",
    "create_connection",
    "create_server",
    "urlopen",
    "Listener",
}
NAMES |= {"TCPStore", "FileStore", "HashStore", "PrefixStore", "Client", "Pipe", "HTTPServer"}
NAMES |= {
    "ThreadingHTTPServer",
    "Popen",
    "exec_module",
    "run_path",
    "system",
    "execv",
    "execve",
    "load_module",
}
WHOLE = {
    "json.loads",
    "json.load",
    "tomli.loads",
    "tomllib.loads",
    "subprocess.run",
    "subprocess.check_output",
}
NOT = {"RunFolder.open", "os.fdopen", "webbrowser.open"}
"""Of calls with such a name, those that open nothing."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    """The modules of titan and its plugins, by what a row calls them."""
    for path in sorted((ROOT / "titancli").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "titancli").with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text())
    for path in sorted((ROOT / "plugins").glob("titan-*/titan_*/**/*.py")):
        parts = path.relative_to(ROOT / "plugins").with_suffix("").parts[1:]
        if parts[0] != "titan_testing":  # it runs where plugins are written
            yield ".".join(parts).removesuffix(".__init__"), ast.parse(path.read_text())


MODULES = dict(sources())


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            yield ast.unparse(node.func), node


def opens(tree: ast.Module) -> list[str]:
    """The calls of a module through which something may come in."""
    return [
        name
        for name, _ in calls(tree)
        if name not in NOT and (name in WHOLE or name.rpartition(".")[2] in NAMES)
    ]


def variables(module: str, tree: ast.Module) -> Iterator[str]:
    """The environment variables that it reads by name."""
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            *(f"os.environ.{way}" for way in ("get", "pop", "setdefault")), "os.getenv"
        ):  # fmt: skip
            key = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            key = node.slice
        if isinstance(key, ast.Constant):
            yield str(key.value)
        elif isinstance(key, ast.Name) and key.id.isupper():
            where = module if module.startswith("titan_") else f"titancli.{module}"
            yield str(getattr(importlib.import_module(where), key.id))


def row(door: Door) -> set[str]:
    """The modules of its patterns."""
    return {name for name in MODULES for pattern in door.modules.split() if fnmatchcase(name, pattern)}


def test_every_module_that_opens_something_has_a_row() -> None:
    guarded = set().union(*map(row, DOORS))
    found = {name: opens(tree) for name, tree in MODULES.items() if name and name not in guarded}
    assert {name: what for name, what in found.items() if what} == {}


def test_every_pattern_of_a_row_is_of_a_module() -> None:
    for door in DOORS:
        for pattern in door.modules.split():
            assert [name for name in MODULES if fnmatchcase(name, pattern)], (door.name, pattern)


def test_every_variable_that_is_read_has_a_row() -> None:
    known = set(" ".join(ENVIRONMENT.values()).split())
    found = defaultdict(set)
    for module, tree in MODULES.items():
        for name in variables(module, tree):
            found[name].add(module)
    assert {name: where for name, where in found.items() if name not in known} == {}
    assert known - found.keys() == set() or absent.ABSENT


def test_what_finds_them_finds_them() -> None:
    text = 'import os, json\nA = 1\nopen("x")\njson.loads(p.read_text())\nos.environ["X"]\nos.getenv("Y", 1)'
    tree = ast.parse(text)
    assert sorted(opens(tree)) == ["json.loads", "open", "p.read_text"]
    assert sorted(variables("x", tree)) == ["X", "Y"]


def test_every_file_of_a_run_folder_has_a_row(tmp_path: Path) -> None:
    more = ('loggers=["csv"]', "checkpoint.last_save_model_only=true", "profiling.enable_profiling=true")
    trained(tmp_path, "--run-dir", "r", "training.steps=6", *more, "profiling.profile_freq=6")
    patterns = " ".join(door.files for door in DOORS).split()
    known = [*patterns, "profile_traces/*", "memory_snapshot/*"]  # written, and read by nothing of titan
    files = [str(path.relative_to(tmp_path / "r")) for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [file for file in files if not any(fnmatchcase(file, pattern) for pattern in known)] == []


TESTS = sorted({test for door in DOORS for test in (door.hostile, door.damaged)} | ENVIRONMENT.keys())


@pytest.mark.parametrize("test", TESTS)
def test_the_tests_of_a_row_are_there(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name in there if name else any(other.startswith("test_") for other in there)


def test_a_door_has_one_row() -> None:
    names = [door.name for door in DOORS]
    assert len(names) == len(set(names)) and all(door.hostile and door.damaged for door in DOORS)
