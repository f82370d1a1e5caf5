"""The run folder: names, records, who holds it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titancli.errors import EnvironmentProblem
from titancli.run.record import new_attempt
from titancli.run.request import Request
from titancli.runs import RunFolder, write_atomically


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TITAN_RUNS", raising=False)
    return tmp_path


def test_a_run_without_a_folder_gets_one_by_name_and_utc_time(here: Path) -> None:
    folder = RunFolder.create("llama")
    assert folder.path.parent == here / "runs"
    assert re.fullmatch(r"llama-\d{8}T\d{6}Z", folder.path.name)
    assert folder.logs.is_dir()
    assert folder.checkpoints.is_dir()


def test_two_runs_in_one_second_get_two_folders() -> None:
    paths = {RunFolder.create("llama").path for _ in range(5)}
    assert len(paths) == 5


def test_titan_runs_moves_the_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_RUNS", str(here / "elsewhere"))
    assert RunFolder.create("llama").path.parent == here / "elsewhere"


def test_a_name_that_is_no_file_name_still_makes_a_folder(here: Path) -> None:
    assert RunFolder.create("a b/../c").path.parent == here / "runs"


def test_a_folder_that_holds_other_things_is_refused(here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(EnvironmentProblem, match="not a run folder"):
        RunFolder.create("llama", here / "mine")


def test_an_empty_folder_is_taken(here: Path) -> None:
    (here / "mine").mkdir()
    assert RunFolder.create("llama", here / "mine").path == here / "mine"


def test_opening_what_is_no_run_names_it(here: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"run folder .*nothing does not exist"):
        RunFolder.open(here / "nothing")
    (here / "empty").mkdir()
    with pytest.raises(EnvironmentProblem, match=r"has no recipe\.lock\.toml"):
        RunFolder.open(here / "empty")


def test_a_run_folder_in_use_is_refused_naming_process_and_host(here: Path) -> None:
    folder = RunFolder.create("llama", here / "run")
    code = (
        "import sys; from pathlib import Path; from titancli.runs import RunFolder\n"
        "hold = RunFolder(Path(sys.argv[1])).hold(); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(
            EnvironmentProblem, match=rf"in use by process {other.pid} on host {os.uname().nodename}"
        ):
            folder.hold()
    finally:
        other.stdin.close()
        other.wait()
        other.stdout.close()
    folder.hold().release()  # a dead process holds nothing


def test_ranks_that_outlive_their_command_still_hold_the_folder(here: Path) -> None:
    folder = RunFolder.create("llama", here / "run")
    command = folder.hold()
    assert not folder.ranks_at_work()
    ranks = [folder.join(), folder.join()]
    command.release()  # it was killed
    assert folder.ranks_at_work()
    with pytest.raises(EnvironmentProblem, match=rf"in use by process {os.getpid()} on host "):
        folder.hold()
    for rank in ranks:
        rank.release()
    folder.hold().release()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_RUNS", "link")
    (here / "link").symlink_to("nowhere")
    with pytest.raises(EnvironmentProblem, match=rf"{here}/link/llama-.*: File exists \({here}/link\)"):
        RunFolder.create("llama")  # it was tried over and over
    with pytest.raises(EnvironmentProblem, match=f"cannot create the run folder {here}/link: File exists"):
        RunFolder(here / "link").make()
    with pytest.raises(EnvironmentProblem, match=r"/b\\udcff' is not valid UTF-8"):
        RunFolder.create("llama", here / "b\udcff")
    (here / "run").mkdir()
    (here / "run/logs").write_text("")
    with pytest.raises(EnvironmentProblem, match=rf"{here}/run: File exists \({here}/run/logs\)"):
        RunFolder(here / "run").make()


def test_a_lock_that_cannot_be_written_is_an_error_that_names_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create("llama", here / "run")

    def full(*given: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(EnvironmentProblem, match=r"cannot write .*run\.lock: No space left on device"):
            folder.hold()
        assert not folder.ranks_at_work()
    folder.hold().release()


def test_a_changed_recipe_keeps_every_lock_file_before_it(here: Path) -> None:
    folder = RunFolder.create("llama", here / "run")
    for text in ("a = 1\n", "a = 2\n", "a = 2\n", "a = 3\n"):
        folder.write_recipe_lock(text)
    kept = {path.name: path.read_text() for path in folder.path.glob("recipe.lock*.toml")}
    assert kept == {
        "recipe.lock.toml": "a = 3\n",
        "recipe.lock.1.toml": "a = 1\n",
        "recipe.lock.2.toml": "a = 2\n",
    }


def test_the_record_is_updated_in_its_newest_attempt(here: Path) -> None:
    folder = RunFolder.create("llama", here / "run")
    folder.write_record({"attempts": [{"outcome": {"why": "stopped"}}, {"outcome": None}]})
    assert folder.outcome() is None
    folder.update_attempt(outcome={"why": "finished"})
    assert folder.outcome() == {"why": "finished"}
    assert folder.record()["attempts"][0] == {"outcome": {"why": "stopped"}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "has format None"),
        ('{"format": 2, "attempts": []}', "has format 2, but this version of titan reads format 1"),
        ('{"format": 1, "attempts": 3}', "has no list of attempts"),
        ('{"attempts": [3]}', "has no list of attempts"),
    ],
)
def test_a_record_that_titan_has_not_written_is_an_error_that_names_it(
    here: Path, text: str, words: str
) -> None:
    folder = RunFolder.create("llama", here / "run")
    folder.record_file.write_text(text)
    with pytest.raises(EnvironmentProblem, match=rf"run\.json {words}"):
        folder.record()


@pytest.mark.parametrize("new", [True, False])
def test_a_new_run_has_nothing_that_changed_since_it_was_last_started(here: Path, new: bool) -> None:
    """Its name may have been taken between the plan and the start: the record there is another run's."""
    folder = RunFolder.create("llama", here / "run")
    folder.write_record({"attempts": [{"versions": {"torch": "2.0"}}]})
    loaded = SimpleNamespace(data={}, path=here / "a.toml", origins={})
    plan: Any = SimpleNamespace(folder=folder, loaded=loaded, new=new, drift=[], checkpoint=None)
    plan.request, plan.from_scratch = Request("a"), False
    request: Any = SimpleNamespace(plugin_files=[], recorded=dict)
    changed = new_attempt(plan, request)["code_drift"]
    assert new is not any(line.startswith("version of torch: 2.0 -> ") for line in changed)


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(here / "run.json", "old")

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(EnvironmentProblem, match=r"run\.json: No space left"):
        write_atomically(here / "run.json", "new")
    assert (here / "run.json").read_text() == "old"
    assert [path.name for path in here.iterdir()] == ["run.json"]
