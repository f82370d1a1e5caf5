"""A test passes with what `tests/programs.py` lists, or says what else it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[1]


def stranger(folder: Path) -> Path:
    """A program that nobody has listed, in a folder that is on the PATH outside of the tests."""
    folder.mkdir()
    program = folder / "stranger"
    program.write_text("#!/bin/sh\necho here\n")
    program.chmod(0o755)
    return folder


CASES = """
import shutil, subprocess, pytest

def test_unseen():
    assert shutil.which("stranger") is None
    assert subprocess.run(["sh", "-c", "command -v stranger"]).returncode != 0

@pytest.mark.needs("stranger", install="apt install strangers")
def test_seen():
    assert subprocess.run(["stranger"], capture_output=True, text=True).stdout == "here\\n"

@pytest.mark.needs("no-such-program|stranger", install="nothing")
def test_either():
    assert shutil.which("stranger")

@pytest.mark.needs("no-such-program", install="apt install it")
def test_skipped():
    raise AssertionError

def test_unseen_afterwards():
    assert shutil.which("stranger") is None
"""


def test_what_is_not_listed_is_seen_only_by_tests_that_say_so(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    outside = os.environ[programs.OUTSIDE] + os.pathsep + str(stranger(tmp_path / "bin"))
    environment = {name: value for name, value in os.environ.items() if name != programs.OUTSIDE}
    options = ["-p", "no:cacheprovider", "-p", "conftest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path / "test_cases.py"],
        cwd=ROOT,
        env={**environment, "PATH": outside},
        capture_output=True,
        text=True,
    )
    assert "4 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "needs no-such-program: apt install it" in done.stdout


def test_the_programs_here_are_those_of_the_list() -> None:
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    assert folders[0] in (programs.HERE, folders[-1])
    for name in os.listdir(folders[-1]):
        assert name in programs.LISTED or name.startswith(("python", "titan"))
    assert shutil.which("sh") and shutil.which("git")


def test_nothing_that_a_test_says_it_needs_is_listed(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        for name in programs.needed(item):
            assert not set(name.split("|")) & set(programs.LISTED), f"{item.nodeid}: {name}"
