"""The end of a run, after its last step: a resume does what is left there, and nothing twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Command, Finished, losses
from titancli.checkpoint.format.manifest import read_manifest
from titancli.observe.events import read_events
from titancli.observe.summary import summarize
from titancli.runs import RunFolder

Train = Callable[..., Finished]

HELD_OUT = "validation.datasets.v={type='text_files', paths=['text.txt'], repeat=false}"
EVALUATED = (HELD_OUT, "validation.steps=2", "validation.freq=2", "training.steps=4")
EXPORTS = ("checkpoint.last_save_model_only=true", "checkpoint.last_save_in_hf=true")
AT_END = """\
import os, signal
from typing import ClassVar
from titancli import component, hookimpl

@component("callback", "at_end", target="at_end:Callback")
class AtEnd:
    \"\"\"Sends a signal when step `step` was evaluated.\"\"\"
    step: int = 4
    rank: int = 0

class Callback:
    def __init__(self, config, *, engine, run):
        self.config = config

    def validated(self, step, metrics):
        if step == self.config.step and int(os.environ.get("RANK", "0")) == self.config.rank:
            if not os.path.exists("told"):
                open("told", "w").close()
                os.kill(os.getpid(), signal.SIGTERM)

@hookimpl
def titan_components():
    return [AtEnd]
"""


def contents(run: Path) -> dict[str, Any]:
    """Return what lies in a run's exports, checkpoints and `best`, without times, ids and places."""
    found: dict[str, Any] = {"best": os.readlink(run / "best")}
    for path in [*run.glob("exports/**/*"), *run.glob("checkpoints/**/*")]:
        name = str(path.relative_to(run))
        if path.name == "manifest.json":
            found[name] = read_manifest(path.parent).state
        elif path.suffix == ".safetensors" or (path.is_file() and path.parent.name.endswith("-hf")):
            found[name] = path.read_bytes()
        else:
            found[name] = None
    return found


def left(run: Path) -> list[str]:
    """Return what is left according to run.json."""
    names: list[str] = RunFolder(run).record()["attempts"][-1]["closing"]["left"]
    return names


def evaluated(run: Path, step: int) -> int:
    events = read_events(run / "events.jsonl")
    return sum(event["event"] == "validation" and event["step"] == step for event in events)


@pytest.mark.e2e
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_at_the_end(command: Callable[..., Command], here: Path, every: int) -> None:
    """Killed before any change of a file after the last step, and resumed, a run has what it would have."""
    shutil.copy(Path(__file__).with_name("killer.py"), here)
    callbacks = 'callbacks=[{type="best"}, {type="ema"}]'
    how = ("-p", "killer.py", *EVALUATED, *EXPORTS, callbacks)

    def run(killer: str, *arguments: str) -> int:
        return command(*arguments, env={**os.environ, "KILLER": killer}).wait().code

    assert run("4:0", "tiny.toml", "--run-dir", "whole", *how) == 0
    whole, moments = contents(here / "whole"), (here / "moments").read_text().splitlines()
    assert len(moments) > 20
    for moment in range(1, len(moments) + 1, every):
        name = f"killed-{moment}"
        assert run(f"4:{moment}", "tiny.toml", "--run-dir", name, *how) == -signal.SIGKILL
        recorded = "recipe.next" in moments[moment - 1]  # the outcome is written before
        assert summarize(here / name).state == ("finished" if recorded else "closing"), moments[moment - 1]
        assert run("4:999", name, "--resume", "-p", "killer.py") == 0
        assert contents(here / name) == whole, moments[moment - 1]
        assert summarize(here / name).state == "finished"
        assert left(here / name) == [] and losses(here / name) == losses(here / "whole")


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_signal_at_the_end(train: Train, train_on: Train, here: Path, rank: int) -> None:
    """A signal after the last step stops the run, with what is left; a resume evaluates nothing again."""
    (here / "at_end.py").write_text(AT_END)
    sys.modules.pop("at_end", None)
    how = (*EVALUATED, *EXPORTS, f'callbacks=[{{type="at_end", rank={rank}}}]', "-p", "at_end.py")

    def start(*arguments: str) -> Finished:
        return train_on(2, *arguments) if rank else train(*arguments)

    assert start("tiny.toml", "--run-dir", "r", *how).code == 75
    run = here / "r"
    assert left(run) == ["callbacks", "exports/step-4", "exports/step-4-hf"]
    assert summarize(run).state == "closing" and not (run / "exports").exists()
    done = start("r", "--resume", "-p", "at_end.py")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (run / "exports").iterdir()) == ["step-4", "step-4-hf"]
    assert evaluated(run, 4) == 1 and left(run) == [] and summarize(run).state == "finished"
    again = start("r", "--resume", "-p", "at_end.py")
    assert again.code == 0 and "r is finished: step 4 of 4" in again.err


def test_failure_at_the_end(train: Train, here: Path) -> None:
    """An export that cannot be written is made by a resume; one that is not wanted any more is left out."""
    run = here / "r"
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    shutil.copytree(run, here / "other")
    (run / "exports").symlink_to(here)
    failed = train("r", "--resume", *EVALUATED, "checkpoint.last_save_in_hf=true")
    assert failed.code != 0 and "is a link" in failed.err
    assert left(run) == ["exports/step-4-hf"] and summarize(run).state == "closing"
    (run / "exports").unlink()
    assert train("r", "--resume").code == 0
    assert (run / "exports/step-4-hf/config.json").is_file() and evaluated(run, 4) == 1

    (here / "other/exports").symlink_to(here)
    assert train("other", "--resume", *EVALUATED, *EXPORTS).code != 0
    done = train(
        "other", "--resume", "checkpoint.last_save_model_only=false", "checkpoint.last_save_in_hf=false"
    )
    assert done.code == 0 and summarize(here / "other").state == "finished"


def test_early_end_is_closed(train: Train, here: Path) -> None:
    """A run that a callback ended before its last step does no other step when it is resumed."""
    run = here / "r"
    stop = 'callbacks=[{type="early_stop", mode="max", patience=1}]'
    run.mkdir()
    (here / "elsewhere").mkdir()
    assert train("tiny.toml", "--run-dir", "r", "--resume", "training.steps=1").code == 0
    (run / "exports").symlink_to(here / "elsewhere")
    how = (HELD_OUT, "validation.freq=1", "validation.steps=2", "training.steps=30", stop)
    assert train("r", "--resume", *how, "checkpoint.last_save_model_only=true").code != 0
    ended = RunFolder(run).record()["attempts"][-1]["closing"]["step"]
    assert ended < 30 and left(run) == [f"exports/step-{ended}"]
    (run / "exports").unlink()
    assert train("r", "--resume").code == 0
    assert max(losses(run)) == ended and (run / f"exports/step-{ended}/manifest.json").is_file()


def test_other_steps_get_another_export(train: Train, here: Path) -> None:
    """Steps that are done again have an export of their own, though one of that step lies there."""
    run = here / "r"
    assert (
        train("tiny.toml", "--run-dir", "r", "training.steps=4", "checkpoint.last_save_in_hf=true").code == 0
    )
    assert train("r", "--resume", "--step", "2", "optimizer.lr=1e-2").code == 0
    first, second = ((run / f"exports/step-4-hf{end}/model.safetensors").read_bytes() for end in ("", "-2"))
    assert first != second


def test_record_of_a_stranger(train: Train, here: Path) -> None:
    """Names of exports in run.json lead nowhere else."""
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    folder = RunFolder(here / "r")
    record = folder.record()
    record["attempts"][-1]["outcome"] = None
    record["attempts"][-1]["closing"] = {"step": 2, "left": ["exports/step-2-hf/../../x", "exports/../y", 3]}
    folder.write_record(record)
    assert train("r", "--resume").code == 0
    assert not (here / "r/exports").exists() and not (here / "r/x").exists()
    assert json.loads((here / "r/run.json").read_text())["attempts"][-1]["closing"]["left"] == []


def test_nothing_saved_nothing_left(train: Train, here: Path) -> None:
    """A run that saves nothing cannot be closed later."""
    (here / "at_end.py").write_text(AT_END)
    sys.modules.pop("at_end", None)
    how = (*EVALUATED, "checkpoint.enable=false", 'callbacks=[{type="at_end"}]', "-p", "at_end.py")
    assert train("tiny.toml", "--run-dir", "r", *how).code == 0
    attempt = RunFolder(here / "r").record()["attempts"][-1]
    assert attempt.get("closing") is None and summarize(here / "r").state == "finished"
    assert evaluated(here / "r", 4) == 1
