"""Each reader of a stranger's file, within bounds of time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.doors import DOORS
from tests.security.readers import ELSEWHERE, MEBIBYTES, OWN, READERS

ROOT = Path(__file__).parents[2]
READ_WHOLE = {("recipe", "expands"), ("task", "expands"), ("task", "nested"), ("task", "endless"),
              ("rows", "nested"), ("table", "nested")}  # fmt: skip
"""Files that are read to their end, or whose faults the reader returns; every other one is refused."""


@pytest.mark.e2e
@pytest.mark.parametrize("name", READERS)
def test_small_files_cost_little(tmp_path: Path, name: str) -> None:
    """The child ends by a signal after 10 CPU-seconds for a file, or if it waits."""
    environment = os.environ | {"TITAN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.readers", name, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {harm: grown for harm, (_, grown) in found.items() if grown > MEBIBYTES} == {}
    refused = {(name, harm) for harm, (error, _) in found.items() if error}
    assert refused == {(name, harm) for harm in found} - READ_WHOLE


def test_every_door_has_a_reader() -> None:
    read = {row.door for row in READERS.values()}
    assert {door.name for door in DOORS} == read | ELSEWHERE.keys() | OWN.keys()
    assert not read & OWN.keys() and not ELSEWHERE.keys() & OWN.keys()


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_other_tests_are_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()
