"""Two attempts in one run folder whose locks do not keep them apart: the older one stops, and neither deletes
what the other is writing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.tensors import RUN, save
from tests.run.conftest import Finished
from titancli.checkpoint.format.manifest import hidden_prefix
from titancli.checkpoint.save import ABANDONED, Draft
from titancli.errors import EnvironmentProblem
from titancli.process import Place
from titancli.run import start
from titancli.runs import ChangedMeanwhile, Claim, RunFolder, TakenOver
from titancli.worker.resume import Resume
from titancli.worker.saving import perhaps_at_work

Train = Callable[..., Finished]


def another_attempt(folder: RunFolder, **values: Any) -> None:
    record = folder.record()
    record["attempts"].append(
        {"token": "another", "host": "elsewhere", "started": "now", "outcome": None, **values}
    )
    folder.write_record(record)


TAKES_OVER = """
import time

from titancli import component, hookimpl

@component("logger", "takes_over", target="takes_over:build")
class TakesOver:
    "Begins another attempt after step 3."

class Logger:
    def __init__(self, folder):
        self.folder = folder

    def step_end(self, step, metrics):
        if step == 3:
            from tests.run.test_two_writers import another_attempt
            from titancli.runs import RunFolder
            while not (self.folder / "checkpoints/step-2").exists():  # it may be saved in the background
                time.sleep(0.01)
            another_attempt(RunFolder(self.folder))

def build(config, run_folder, is_main):
    return Logger(run_folder)

@hookimpl
def titan_components():
    return [TakesOver]
"""


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_an_attempt_that_another_one_follows_saves_nothing_more_and_ends(
    train: Train, here: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where a save that fails would not end the run; and the other's record stays as it is."""
    (here / "takes_over.py").write_text(TAKES_OVER)
    monkeypatch.delitem(__import__("sys").modules, "takes_over", raising=False)
    chosen = ("-p", "./takes_over.py", 'loggers=[{type="takes_over"}]', f"checkpoint.async_mode={mode}")
    done = train("tiny.toml", "--run-dir", "r", *chosen)
    assert done.code == 5, done.err
    assert "another attempt has begun in" in done.err and "on elsewhere at now" in done.err
    assert [path.name for path in (here / "r/checkpoints").iterdir()] == ["step-2"]
    newest = RunFolder(here / "r").record()["attempts"][-1]
    assert (newest["token"], newest["outcome"]) == ("another", None)
    events = [json.loads(line)["event"] for line in (here / "r/events.jsonl").open()]
    assert "run_end" not in events


MOVES = TAKES_OVER.replace("takes_over", "moves").replace(
    "another_attempt(RunFolder(self.folder))", 'self.folder.rename(self.folder.with_name("moved"))'
)


def test_a_run_whose_folder_is_moved_saves_nothing_elsewhere_and_says_so(
    train: Train, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "moves.py").write_text(MOVES)
    monkeypatch.delitem(__import__("sys").modules, "moves", raising=False)
    done = train("tiny.toml", "--run-dir", "r", "-p", "./moves.py", 'loggers=[{type="moves"}]')
    assert done.code == 5 and "Traceback" not in done.err, done.err
    assert f"step 4 was not saved, training continues: {here}/r/run.json is gone: the run folder" in done.err
    assert not (here / "r/checkpoints").exists()
    assert [path.name for path in (here / "moved/checkpoints").iterdir()] == ["step-2"]


def test_a_claim_holds_until_another_attempt_is_recorded(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(EnvironmentProblem, match=r"run\.json is gone: the run folder was moved or deleted"):
        Claim(folder, "mine").check()
    folder.write_record({"attempts": [{"token": "mine"}]})
    Claim(folder, "mine").check()
    another_attempt(folder)
    with pytest.raises(TakenOver, match="on elsewhere at now"):
        Claim(folder, "mine").check()
    Claim(folder, "another").check()
    folder.record_file.write_text("{half")
    with pytest.raises(EnvironmentProblem, match="cannot read"):
        Claim(folder, "mine").check()


def test_ranks_that_are_started_anew_do_not_take_the_other_attempt_for_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_record({"attempts": [{"token": "mine"}]})
    another_attempt(folder)
    rank = Resume(folder, Place(restart=1))
    monkeypatch.setenv("TITAN_ATTEMPT", "")  # several nodes: the record says it
    assert rank.record() == folder.record()
    monkeypatch.setenv("TITAN_ATTEMPT", "mine")
    with pytest.raises(TakenOver):
        rank.record()


def test_the_claim_is_asked_again_right_before_the_rename(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_record({"attempts": [{"token": "mine"}]})
    draft = Draft(tmp_path / "step-1", {}, "", RUN, {}, claim=Claim(folder, "mine"))
    hidden = draft.open(0)
    assert hidden.name.startswith(f"{hidden_prefix('step-1', RUN)}mine-")
    another_attempt(folder)
    with pytest.raises(TakenOver):
        draft.complete({}, {})
    draft.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_an_attempt_on_another_host_is_writing_is_left_alone_until_it_is_old(tmp_path: Path) -> None:
    prefix = hidden_prefix("step-1", RUN)
    in_flight, old, dead, own = (
        tmp_path / f"{prefix}{name}" for name in ("aaaaaaaa-0", "aaaaaaaa-1", "bbbbbbbb-0", "01234567")
    )
    for folder in (in_flight, old, dead, own):
        folder.mkdir()
        (folder / "data").write_text("")
    for path in (old / "data", old):
        long_ago = time.time() - ABANDONED - 60
        os.utime(path, (long_ago, long_ago))
    Draft(tmp_path / "step-2", {}, "", RUN, {}, spared=["aaaaaaaabbbbbbbb"]).open(0)
    assert [folder.exists() for folder in (in_flight, old, dead, own)] == [True, False, False, False]
    save(tmp_path / "step-3")  # which spares nothing
    assert not in_flight.exists()


def test_attempts_here_and_those_that_ended_are_not_at_work() -> None:
    here = os.uname().nodename
    attempts = [
        {"token": "a", "host": "elsewhere", "outcome": None},
        {"token": "b", "host": "elsewhere", "outcome": {"why": "stopped"}},
        {"token": "c", "host": here, "outcome": None},
        {"host": "elsewhere", "outcome": None},
        {"token": "own", "host": "elsewhere", "outcome": None},
    ]
    assert perhaps_at_work({"attempts": attempts}) == ["a"]


def test_a_checkpoint_that_appears_between_the_plan_and_the_lock_is_used(
    train: Train, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt before saves its last step in the very moment."""
    assert train("tiny.toml", "--run-dir", "r", "training.steps=4", "lr_scheduler.total_steps=6").code == 0
    last, aside = here / "r/checkpoints/step-4", here / "step-4"
    last.rename(aside)
    made, calls = start.make_folder, []

    def appears(plan: Any) -> RunFolder:
        calls.append(plan.start_step)
        if len(calls) == 1:
            aside.rename(last)
        return made(plan)

    monkeypatch.setattr(start, "make_folder", appears)
    done = train("tiny.toml", "--run-dir", "r", "--resume")
    assert done.code == 0, done.err
    assert calls == [2, 4] and "another attempt has used" in done.err and "from step-4" in done.err
    assert done.err.count("\nrun folder: r\n") == 1


def test_two_that_both_would_begin_a_run_do_not_overwrite_each_other(
    train: Train, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = start.make_folder, []

    def appears(plan: Any) -> RunFolder:
        calls.append(plan.new)
        if len(calls) == 1:
            assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
            calls.pop()
        return made(plan)

    monkeypatch.setattr(start, "make_folder", appears)
    done = train("tiny.toml", "--run-dir", "r", "--resume")
    assert done.code == 0 and "from step-2" in done.err
    assert len(RunFolder(here / "r").record()["attempts"]) == 2


def test_one_that_changes_all_the_time_is_given_up(train: Train, here: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "history", lambda folder: (7, 7))
        done = train("tiny.toml", "--run-dir", "r")
    assert done.code == 5 and "run the same command again" in done.err
    assert isinstance(ChangedMeanwhile(RunFolder(here)).__reduce__()[1][0], RunFolder)
