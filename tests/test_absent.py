"""Tests that need a deleted plugin are skipped, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import absent
from titancli.registry.first_party import FOLDER, PLUGINS

GONE = "from tests import absent\nabsent.ABSENT.add('titan-gone')\n"
IMPORTS = "import titan_gone\ndef test_it(): ...\n"
SOME = """
def test_imports():
    from titan_gone.part import x

def test_names():
    raise ValueError("the loop gone comes with titan-gone, which is not installed")

def test_other():
    raise ValueError("the loop other comes with titan-other, which is not installed")

def test_none():
    assert True
"""


def test_only_tests_of_a_deleted_plugin_skip(tmp_path: Path) -> None:
    for name, text in {"gone": GONE, "test_imports": IMPORTS, "test_some": SOME}.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.absent", "-p", "gone", "-rA", "-q", str(tmp_path)]
    environment = {"PYTHONPATH": f"{tmp_path}:{FOLDER.parent}", "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 failed, 1 passed, 3 skipped" in done.stdout, done.stdout + done.stderr
    assert "titan-gone is not here" in done.stdout
    assert "FAILED test_some.py::test_other" in done.stdout


def test_every_plugin_of_the_checkout_is_known() -> None:
    here = {folder.parent.name for folder in FOLDER.glob("*/pyproject.toml")}
    assert here | absent.ABSENT == PLUGINS | absent.ABSENT


def test_a_plugin_that_is_here_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "ABSENT", {"titan-gone"})
    assert absent.named("titan_gone.part failed") == "titan-gone"
    assert absent.named("titan-rl failed") is None
    assert absent.Missing().find_spec("titan_rl") is None
