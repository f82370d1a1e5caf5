"""Which tests `make test` runs, and how that is chosen: `tests/choice`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import choice
from tests.choice import changed, mutants
from tests.choice.choose import ABSENT, NIGHTLY, choose, nightly, questions
from tests.choice.reading import ROOT, Functions, Measured, owner, read

BRANCHES = [("titancli/terminal.py", line, line + 1) for line in range(1, 400)]


# ---------------------------------------------------------------------------------------- what is left out


def test_what_is_left_out_is_there(request: pytest.FixtureRequest) -> None:
    for file in {name.partition("::")[0] for name in nightly()}:
        assert (ROOT / file).is_file(), f"{NIGHTLY} names tests of a file that is not there"
    if any("::" in word for word in request.config.args):
        pytest.skip("single tests were asked for, so not all are known")
    assert not request.config.stash[ABSENT], (
        f"{NIGHTLY} names tests that are not there: rename the lines, or remove them, and the test "
        "belongs to `make test`"
    )


def test_a_name_that_is_not_there_is_noticed() -> None:
    done = subprocess.run([sys.executable, "-c", STALE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "names tests that are not there" in done.stdout and "::test_gone" in done.stdout


STALE = """
import sys, pytest
import tests.choice.choose as choose
choose.nightly = lambda: {"tests/test_choice.py::test_gone"}
words = ["-q", "-p", "no:cacheprovider", "tests/test_choice.py", "-k", "left_out_is_there"]
sys.exit(pytest.main(words))
"""


def test_every_fault_keeps_a_test() -> None:
    from tests.faults.test_matrix import MATRIX

    for row in MATRIX.values():
        assert {f"tests/{name}" for name in row.tests} - nightly(), row.fault


# ------------------------------------------------------------------------------------------------- choosing


@st.composite
def measured(draw: st.DrawFn) -> dict[str, Measured]:
    tests = {}
    for number in range(draw(st.integers(0, 12))):
        branches = draw(st.sets(st.sampled_from(BRANCHES), max_size=12))
        cpu, slow, passed = draw(st.floats(0, 9)), draw(st.booleans()), draw(st.booleans())
        name = f"tests/test_a.py::test_{number}"
        tests[name] = Measured(name, cpu, slow, passed, branches)
    return tests


@given(measured(), st.sets(st.integers(0, 11)))
def test_what_stays_runs_and_asks_all_that_any_does(tests: dict[str, Measured], faulty: set[int]) -> None:
    asked: dict[str, set[object]] = {
        name: {"fault"} if number in faulty else set() for number, name in enumerate(tests)
    }
    stay = choose(tests, asked, cheap=1)
    functions = Functions()
    for test in tests.values():
        for branch in test.branches:
            if any(functions.at(branch[0], line) for line in branch[1:]):
                assert any(branch in tests[name].branches for name in stay)
        if not test.slow and (test.cpu < 1 or not test.passed):
            assert test.name in stay
    assert any(asked[name] for name in stay) == any(asked.values())


def test_the_cheapest_of_equals_stays() -> None:
    branches = {branch for branch in BRANCHES if Functions().at(branch[0], branch[1])}
    assert branches
    tests = {
        name: Measured(name, cpu, False, True, branches) for name, cpu in (("a", 9.0), ("b", 3.0), ("c", 4.0))
    }
    assert choose(tests, {name: set() for name in tests}) == {"b"}


def test_a_case_of_each_test_a_fault_and_a_feature_are_asked() -> None:
    layout = "tests/ranks/test_same_answer.py::test_every_layout_gives_the_answer_of_one_rank[TP2]"
    kill = "tests/checkpoint/test_faults.py::test_kill_9_at_any_moment_leaves_a_good_checkpoint[async]"
    asked = questions([layout, kill])
    assert "degree tp" in asked[layout] and layout.partition("[")[0] in asked[layout]
    assert "fault 1" in asked[kill]


# ------------------------------------------------------------------------------------------------ measuring


@pytest.mark.parametrize(
    ("context", "test"),
    [
        ("tests/a.py::test[x (y)] (call)", "tests/a.py::test[x (y)]"),
        ("tests/a.py::test_first (setup)|tests/a.py::test_now (call)", "tests/a.py::test_now"),
        ("tests/a.py::test", "tests/a.py::test"),
        ("", ""),
    ],
)
def test_a_context_belongs_to_the_test_that_was_given_last(context: str, test: str) -> None:
    assert owner(context) == test


CASES = """
import subprocess, sys
import pytest
from titancli.checkpoint.format.disk import size_text
from titancli.files import parse_json

def test_here():
    size_text(1)

def test_ranks(ranks):
    ranks(2, size_text, 1)

def test_the_same_ranks(ranks):
    ranks(2, parse_json, "1")

def test_a_fork():
    subprocess.run([sys.executable, "-m", "titancli", "--version"], check=True, env={})

@pytest.mark.cold
def test_an_interpreter_of_its_own():
    subprocess.run([sys.executable, "-m", "titancli", "--version"], check=True)

def test_that_fails():
    assert parse_json("1") == 2
"""


@pytest.mark.slow
def test_all_processes_of_a_test_are_measured(tmp_path: Path) -> None:
    """Its own, those forked from a warm server, interpreters of their own, and ranks that outlive a test."""
    (tmp_path / "test_cases.py").write_text(CASES)
    options = ["-q", "-p", "conftest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    command = [sys.executable, "-m", "tests.choice", "--folder", tmp_path, "record", "--workers", "1"]
    done = subprocess.run(
        [*command, *options, tmp_path / "test_cases.py"],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if name not in (choice.START, choice.TEST)},
        capture_output=True,
        text=True,
    )
    assert "1 failed, 5 passed" in done.stdout, done.stdout + done.stderr
    tests = {name.partition("::")[2]: test for name, test in read(tmp_path / "last").items()}
    functions = Functions()
    size_text, parse = (
        ("titancli/checkpoint/format/disk.py", "size_text"),
        ("titancli/files.py", "parse_json"),
    )
    main = ("titancli/cli/__init__.py", "main")
    expected = {
        "test_here": {size_text},
        "test_ranks": {size_text},
        "test_the_same_ranks": {parse},
        "test_a_fork": {main},
        "test_an_interpreter_of_its_own": {main},
        "test_that_fails": {parse},
    }
    assert tests.keys() == expected.keys()
    for name, ran in expected.items():
        found = {(file, functions.at(file, line)) for file, line in tests[name].lines()}
        assert found & {size_text, parse, main} == ran, name
        assert tests[name].cpu > 0 and tests[name].passed == (name != "test_that_fails")


# ------------------------------------------------------------------------------------------ what was edited

SOURCE = '''
def used(x):
    """Add."""
    return x + 1

def unused():
    return {two}

class Kind:
    def method(self):
        def inner():
            return {three}
        return inner()

CONSTANT = {one}
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one file and two tests that have been measured: one of a function, one of an inner
    one."""
    monkeypatch.setattr("tests.choice.changed.ROOT", tmp_path)
    monkeypatch.setattr("tests.choice.reading.ROOT", tmp_path)
    monkeypatch.setattr("tests.choice.changed.Functions", lambda: Functions(tmp_path))
    (tmp_path / "a.py").write_text(SOURCE.format(one=1, two=2, three=3))
    (tmp_path / "test_a.py").write_text("")
    (tmp_path / ".gitignore").write_text("ran.sqlite\n")
    for words in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-m", "a"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)
    tests = [
        Measured("test_a.py::test_used", 2.0, False, True, {("a.py", -2, 4), ("a.py", 4, -2)}),
        Measured("test_a.py::test_inner", 1.0, False, True, {("a.py", -10, 13), ("a.py", -11, 12)}),
    ]
    changed.remember(tmp_path / "ran.sqlite", tests)
    return tmp_path


@pytest.mark.parametrize(
    ("numbers", "more", "expected"),
    [
        ((1, 2, 3), "", []),
        ((1, 2, 3), "# a comment\n", []),
        ((1, 7, 3), "", []),
        ((1, 2, 7), "", ["test_a.py::test_inner"]),
        ((7, 2, 3), "", ["test_a.py::test_inner", "test_a.py::test_used"]),
        ((1, 2, 3), "def used(x): return x", ["test_a.py::test_inner", "test_a.py::test_used"]),
        ((1, 2, 3), "def (", ["test_a.py::test_inner", "test_a.py::test_used"]),
    ],
)
def test_what_ran_an_edited_function_runs_again(
    project: Path, numbers: tuple[int, int, int], more: str, expected: list[str]
) -> None:
    one, two, three = numbers
    (project / "a.py").write_text(SOURCE.format(one=one, two=two, three=three) + more)
    assert changed.affected(project / "ran.sqlite") == (expected, [])


def test_new_tests_run_and_what_nobody_knows_is_named(project: Path) -> None:
    (project / "test_b.py").write_text("def test_b(): pass")
    (project / "README.md").write_text("words")
    assert changed.affected(project / "ran.sqlite") == (["test_b.py"], ["README.md"])
    (project / "a.py").unlink()
    tests, _ = changed.affected(project / "ran.sqlite")
    assert set(tests) == {"test_b.py", "test_a.py::test_used", "test_a.py::test_inner"}
    (project / "test_a.py").unlink()  # what is gone cannot be run
    assert changed.affected(project / "ran.sqlite")[0] == ["test_b.py"]


def test_a_test_that_failed_runs_again_until_it_passes(project: Path) -> None:
    test = Measured("test_a.py::test_used", 2.0, False, False, {("a.py", -2, 4)})
    changed.remember(project / "ran.sqlite", [test])
    assert changed.affected(project / "ran.sqlite")[0] == ["test_a.py::test_used"]
    test.passed = True
    changed.remember(project / "ran.sqlite", [test])
    assert changed.affected(project / "ran.sqlite")[0] == []


def test_nothing_is_known_before_a_measurement(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.choice", "--folder", tmp_path, "changed"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "make record" in done.stderr


# --------------------------------------------------------------------------------------------------- faults


def test_each_fault_is_one_change_that_can_be_compiled() -> None:
    for file in ("titancli/errors.py", "titancli/losses/chunked.py", "titancli/engine/engine.py"):
        source = (ROOT / file).read_bytes()
        found = list(mutants.faults(file, source))
        assert len(found) > 10 and len(set(found)) == len(found)
        for fault in found:
            harmed = fault.put_into(source)
            assert ast.dump(ast.parse(harmed)) != ast.dump(ast.parse(source)), fault.shown(source)
            assert source.splitlines()[: fault.line - 1] == harmed.splitlines()[: fault.line - 1]


def test_a_fault_is_noticed_by_the_test_that_fails(tmp_path: Path) -> None:
    source = b"def least(a, b):\n    return a if a < b else b\n"
    (tmp_path / "a.py").write_bytes(source)
    (tmp_path / "test_a.py").write_text(
        "from a import least\n"
        "def test_equal(): assert least(1, 1) == 1\n"
        "def test_least(): assert least(1, 2) == 1\n"
    )
    (tmp_path / ".venv").symlink_to(sys.prefix)
    found = {fault.new: fault for fault in mutants.faults("a.py", source)}
    assert found.keys() == {"<=", "return None"}
    equal, least = "test_a.py::test_equal", "test_a.py::test_least"
    assert mutants.noticed(tmp_path, found["<="], [equal, least]) is None
    assert mutants.noticed(tmp_path, found["return None"], [least, equal]) == least
    assert mutants.noticed(tmp_path, found["return None"], []) is None
    assert (tmp_path / "a.py").read_bytes() == source


def test_faults_are_drawn_from_lines_that_tests_run() -> None:
    lines = mutants.lines_of(
        [Measured("a", 1.0, False, True, {("titancli/errors.py", 1, n) for n in range(1, 99)})]
    )
    one, other = (mutants.drawn(ROOT, lines, 3, seed) for seed in (7, 7))
    assert one == other and all(fault.line in lines[fault.file] for fault in one)
