"""What surrounds the tests does not decide whether they pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

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


def test_ci_runs_the_declared_range_of_versions() -> None:
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    jobs = yaml.safe_load((root / ".github/workflows/ci.yml").read_text())["jobs"]
    rows = jobs["versions"]["strategy"]["matrix"]["include"]
    (setup,) = (step["with"] for step in jobs["test"]["steps"] if "with" in step)
    pythons = {setup["python-version"], *(row["python"] for row in rows)}
    named = "Programming Language :: Python :: "
    assert {f"{named}{version}" for version in pythons} == {c for c in project["classifiers"] if named in c}
    (oldest,) = (r for r in project["dependencies"] if r.startswith("torch>="))
    pinned = re.search(r"^torch==(.+)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    torches = sorted({pinned[1], *(row["torch"] for row in rows)}, key=Version)
    assert oldest == f"torch>={torches[0].removesuffix('.0')}"
    assert f"TORCHES:-{' '.join(torches[:-1])} $pinned" in (root / "tests/versions.sh").read_text()
    assert torches[-1] == pinned[1]
