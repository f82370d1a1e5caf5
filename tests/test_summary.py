"""The plugin that tells how a run of the tests goes: on a folder of its own, with and without workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proven import Fact, lines_of, tables_of
from tests.summary import FIRST, ROOMS, Durations, room_of

ROOT = Path(__file__).parents[1]
FILES = {
    "tests/one/test_good.py": """
import pytest

@pytest.mark.parametrize("name", ["a", "b"])
def test_good(record_property, name):
    record_property("family", name)

def test_that_is_skipped():
    pytest.skip("for no reason")
""",
    "tests/two/test_bad.py": """
def test_bad(record_property):
    record_property("family", "c")
    assert 1 == 2, "that is wrong"
""",
    "tests/two/test_end.py": """
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError("at the end")

def test_whose_fixture_breaks(broken):
    pass
""",
}


def run(folder: Path, *arguments: str, addopts: str = "") -> tuple[int, list[str]]:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p tests.summary\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": addopts, "PYTHONPATH": str(ROOT), "PY_COLORS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def begins(lines: list[str], *texts: str) -> list[bool]:
    return [any(line.startswith(text) for line in lines) for text in texts]


@pytest.mark.parametrize("workers", [0, 2])
def test_rooms_failures_and_what_is_proven_are_told(tmp_path: Path, workers: int) -> None:
    code, lines = run(tmp_path, *(["-n", "2", "--dist", "loadfile"] if workers else []))
    assert code == 1
    [start] = [line for line in lines if re.match(r"\d+ tests in", line)]
    assert start.startswith(f"5 tests in 2 rooms, {workers or 1} worker")
    assert "FAILED tests/two/test_bad.py::test_bad: AssertionError: that is wrong" in lines
    assert (
        "FAILED in teardown tests/two/test_end.py::test_whose_fixture_breaks: RuntimeError: at the end"
        in lines
    )
    rooms = {line.split()[0]: line.split()[1:] for line in lines if re.match(r"tests/(one|two) ", line)}
    assert rooms["tests/one"][:4] == ["2", "passed,", "1", "skipped"]
    assert rooms["tests/two"][:2] == ["2", "failed"]
    assert any(words[-3:] == ["100", "%", "done"] for words in rooms.values())
    [proven] = [line for line in lines if line.startswith("families: whole runs")]
    assert proven.split("  ")[-1] == "a, b learn, go on bit for bit, and are exported; FAILED c"


@pytest.mark.parametrize(
    ("addopts", "told"),
    [
        ("-q", False),
        ("-v", False),
        ("-q -n 2", False),
        ("-p no:cacheprovider", True),
        ("-p no:xdist", True),
        ("--tb=no -x -s --color=yes", True),
        ("-k good", True),
    ],
)
def test_whatever_a_user_has_set(tmp_path: Path, addopts: str, told: bool) -> None:
    code, lines = run(tmp_path, addopts=addopts)
    assert code == (0 if "-k" in addopts else 1), lines
    assert any(re.match(r"\d tests in \d room", line) for line in lines) == told
    assert any("families: whole runs" in line for line in lines) == ("-q" not in addopts)


def test_without_a_terminal_reporter_nothing_is_told(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "-p", "no:terminal")
    assert (code, lines) == (1, [])


def test_a_worker_that_dies_is_a_failure_and_the_rest_is_told(tmp_path: Path) -> None:
    (tmp_path / "tests/three").mkdir(parents=True)
    (tmp_path / "tests/three/test_dies.py").write_text("import os\ndef test_dies():\n    os._exit(3)\n")
    code, lines = run(tmp_path, "-n", "2", "--dist", "loadfile")
    assert code == 1
    assert (
        begins(lines, "FAILED tests/three/test_dies.py::test_dies", "tests/three          1 failed")
        == [True] * 2
    )
    assert any(line.startswith("tests/one ") for line in lines)


def test_durations_are_recorded_of_whole_files_that_pass(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    known = Durations({"there.py": (1.0, 2), "gone.py": (3.0, 4), "new.py": (9.0, 9)})
    (tmp_path / "new.py").touch()
    known.write({"new.py": (2.26, 3)}, tmp_path, tmp_path / "table.json")
    assert Durations.read(tmp_path / "table.json").known == {"new.py": (2.3, 3), "there.py": (1.0, 2)}
    code, lines = run(tmp_path, "--record-durations", "-k", "good")
    assert code == 4 and "ERROR: --record-durations needs whole files" in lines


def test_the_longest_come_first_but_for_what_needs_no_torch() -> None:
    known = Durations(
        {
            "tests/a/test_1.py": (5.0, 1),
            "tests/a/test_2.py": (90.0, 9),
            "tests/b/test_3.py": (80.0, 1),
            "tests/cli/test_4.py": (1.0, 1),
            "tests/recipe/test_5.py": (2.0, 1),
            "tests/recipe/test_6.py": (3.0, 1),
        }
    )
    order = known.in_order(f"{file}::test" for file in known.known)
    assert [file.rpartition("_")[2] for file in sorted(order, key=order.__getitem__)] == [
        f"{number}.py" for number in (6, 5, 4, 2, 1, 3)
    ]
    assert known.of_test("tests/a/test_2.py::test") == 10.0
    assert known.of_test("tests/c/test_new.py::test") == pytest.approx(181 / 14)


def test_every_room_has_its_words() -> None:
    files = [
        path.relative_to(ROOT).as_posix()
        for top in ("tests", "plugins")
        for path in ROOT.glob(f"{top}/**/test_*.py")
    ]
    assert {room_of(file) for file in files} == set(ROOMS), "tests/summary.py says what each folder proves"
    assert set(FIRST) <= set(ROOMS)


LAYOUT = {"layout": "FSDP2", "ranks": 2, "optimizer": "sgd", "loss": 0.0, "norm": 1e-6, "gradient": 4e-6}
LAYOUT |= {"weight": 0.0, "worst": "gradient 0 x", "tie": None, "tolerance": 1e-5, "seconds": 1.0}


def test_the_worst_layouts_are_named_and_what_fails_is_counted() -> None:
    facts = [Fact(LAYOUT | {"layout": f"L{n}", "gradient": n * 1e-6}, True) for n in range(1, 6)]
    facts.append(Fact(LAYOUT | {"layout": "bad", "gradient": 1.0}, False))
    (first, wrong), *rest = lines_of({"layout": facts}, {})
    assert "5 of 6 agree with one rank" in first and wrong
    assert [line.split("  ")[-1].split(" ")[0] for line, _ in rest] == ["bad", "L5", "L4"]
    [(_, table)] = tables_of({"layout": facts})
    assert [line.split()[0] for line in table] == ["layout", "L1", "L2", "L3", "L4", "L5", "bad"]


def test_errors_in_verbs_are_counted_by_what_they_leave() -> None:
    rows = [["load", "a file", "refuses"], ["forward", "a layer", "equal"], ["sampling", "body", "-"]]
    facts = {"raised": [Fact({"layout": "one", "rows": rows}, True)]}
    [(line, wrong)] = lines_of(facts, {})
    assert "2 errors in the middle of verbs, on 1 layouts: 1 leave no trace" in line and not wrong
    facts["raised"].append(Fact({"layout": "two", "rows": [["load", "a file", "weights differ"]]}, False))
    [(line, wrong)] = lines_of(facts, {})
    assert "on 1 of 2 layouts" in line and "1 are WRONG" in line and wrong
    [(_, table)] = tables_of(facts)
    assert table[-3].split() == ["load:", "a", "file", "refuses", "WRONG"]


def test_a_fault_is_survived_only_if_all_its_tests_passed() -> None:
    facts = {
        "fault": [
            Fact({"fault": f"F{tests}", "holds": "", "tests": tests}, True)
            for tests in (["a::1"], ["a::1", "b::2"])
        ]
    }
    [(line, wrong)] = lines_of(facts, {"tests/a::1[x]": "passed"})
    assert "1 of 1 survived, by 1 tests; 1 others are not tried" in line and not wrong
    [(line, wrong)] = lines_of(facts, {"tests/a::1[x]": "passed", "tests/b::2": "passed"})
    assert "2 of 2 survived, by 2 tests" in line and not wrong
    [(line, wrong)] = lines_of(
        facts, {"tests/a::1[x]": "passed", "tests/a::1[y]": "failed", "tests/b::2": "passed"}
    )
    assert "0 of 2 survived" in line and line.count("FAILED") == 2 and wrong
