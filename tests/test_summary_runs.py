"""The plugin that tells how a run of the tests goes: on a folder of its own, with and without workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert proven.split("  ")[-1].strip() == "a, b learn, go on bit for bit, and are exported; FAILED c"


@pytest.mark.parametrize(
    ("addopts", "told"),
    [
        pytest.param("-q", False, marks=pytest.mark.slow),
        pytest.param("-v", False, marks=pytest.mark.slow),
        pytest.param("-q -n 2", False, marks=pytest.mark.slow),
        pytest.param("-p no:cacheprovider", True, marks=pytest.mark.slow),
        ("-p no:xdist", True),
        pytest.param("--tb=no -x -s --color=yes", True, marks=pytest.mark.slow),
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


def test_a_worker_that_dies_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "tests/three").mkdir(parents=True)
    (tmp_path / "tests/three/test_dies.py").write_text("import os\ndef test_dies():\n    os._exit(3)\n")
    code, lines = run(tmp_path, "-n", "2", "--dist", "loadfile", "--max-worker-restart=0")
    assert code != 0
    assert any(line.startswith("FAILED tests/three/test_dies.py::test_dies") for line in lines)


def test_durations_are_recorded_of_whole_files_alone(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "--record-durations", "-k", "good")
    assert code == 4 and "ERROR: --record-durations needs whole files" in lines
