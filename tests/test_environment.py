"""What surrounds the tests does not decide whether they pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import run


def test_what_tests_start_can_be_interrupted_where_the_tests_run_in_the_background() -> None:
    # A shell script's `command &` has SIGINT ignored, which children inherit.
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    inner = f"import conftest, subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", inner],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.stdout.strip() == "True"


def test_options_for_these_tests_are_not_those_of_tests_that_they_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    done = run(sys.executable, "-c", "import os; print('PYTEST_ADDOPTS' in os.environ)", cwd=tmp_path)
    assert done.stdout.strip() == "False"


def test_versions_of_which_there_is_no_python_are_not_reported_as_tested() -> None:
    script = Path(__file__).with_name("versions.sh")
    done = subprocess.run(
        [script], env={**os.environ, "PYTHONS": "python2.7 no-python"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "no Python of 3.11 or newer among: python2.7 no-python\n" and done.stdout == ""
