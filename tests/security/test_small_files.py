"""The small files of a run folder, each by the function that reads it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.security.test_run_folders import deep, device, endless, fifo, folder, garbage
from titan_proof.digests import read_digests
from titan_report import view
from titan_rl import recorded
from titan_slurm.jobs import SlurmFiles
from titan_sweep import sweep
from titancli.errors import TitanError
from titancli.launchers import rendezvous
from titancli.observe import failures, notes, profile_request
from titancli.observe.summary import Summary
from titancli.recipe import load_recipe
from titancli.runs import RunFolder


def summary(path: Path) -> Summary:
    return Summary(path, "died", "x", 1, 2, {}, None, None)


READERS: dict[str, Callable[[Path], Any]] = {
    "profile.request": lambda path: profile_request.Requests(path).wish(),
    profile_request.ANSWER: lambda path: profile_request.answer_to(path, "x"),
    "logs/rank-0.error.json": lambda path: failures.read(path / "logs"),
    "slurm/jobs.json": lambda path: SlurmFiles(RunFolder(path)).jobs(),
    sweep.SWEEP_NAME: sweep._record,
    "rollouts/step-1.jsonl": lambda path: recorded.read(path / "rollouts/step-1.jsonl"),
    "evaluations/step-1/a.json": lambda path: view.evaluations(summary(path)),
    "digests/1.0/rank-0.bin": read_digests,
    "rendezvous/1": lambda path: (rendezvous._read(path / "rendezvous/1"), silent(path)),
    "recipe.lock.toml": load_recipe,
    "run.json": lambda path: RunFolder(path).record(),
    notes.FILE: notes.read,
}


def silent(path: Path) -> bool:
    with suppress(OSError):
        return rendezvous.Meeting(path / "rendezvous", 1.0)._silent(path / "rendezvous/1")
    return False


@pytest.mark.parametrize("harm", [deep, fifo, device, folder, endless, garbage])
@pytest.mark.parametrize("name", READERS)
def test_a_small_file_that_is_none_is_refused_or_left_out(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    harm(path)
    try:
        found = READERS[name](tmp_path)
    except TitanError as error:
        assert str(path) in str(error) or name == "recipe.lock.toml"  # it has places instead
    else:
        assert not found or found == (None, False)


TORN = ["", "host\n{}\n", "host:port\n{}\n", ":1\n{}\n", "host:1\n[]\n", "host:1\n{}", 'host:1\n{"a": 1}\n']


@pytest.mark.parametrize("text", TORN)
def test_what_no_node_has_written_is_no_place_to_meet(tmp_path: Path, text: str) -> None:
    (tmp_path / "1").write_text(text)
    assert rendezvous._read(tmp_path / "1") is None
    (tmp_path / "1").write_text('host:1\n{"a": "b"}\n')
    assert rendezvous._read(tmp_path / "1") == ("host:1", {"a": "b"})
    assert os.listdir(tmp_path) == ["1"]
