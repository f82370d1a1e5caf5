"""A resume with changes: its recipe replaces that of the run once all ranks have loaded, or not at all."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.run.conftest import Finished, losses
from titancli.errors import EnvironmentProblem
from titancli.runs import ATTEMPT, RunFolder
from titancli.worker.attempt import take_part

Train = Callable[..., Finished]

STATE = "optimizer.state_dtype=bfloat16"
"""A change that no checkpoint of the tiny run can be loaded with."""


def locks(run: Path) -> dict[str, str]:
    """Return the recipes that lie in a run folder, by name."""
    return {path.name: path.read_text() for path in run.glob("recipe.*.toml")}


def late(here: Path) -> tuple[str, str]:
    """Write the plugin of a callback that raises when the run begins, and return its option."""
    (here / "tardy.py").write_text(LATE)
    sys.modules.pop("tardy", None)  # each folder has a copy of its own
    return "-p", "tardy.py"


@pytest.mark.ranks
@pytest.mark.parametrize("ranks_", [1, 2])
def test_failed_change_leaves_the_lock(train: Train, train_on: Train, here: Path, ranks_: int) -> None:
    def start(*arguments: str) -> Finished:
        return train(*arguments) if ranks_ == 1 else train_on(ranks_, *arguments)

    assert start("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    before = locks(here / "r")
    failed = start("r", "--resume", "training.steps=4", STATE)
    assert failed.code != 0 and "bfloat16" in failed.err
    assert locks(here / "r") == before and list(before) == ["recipe.lock.toml"]
    done = start("r", "--resume", "training.steps=4")
    assert done.code == 0, done.err
    assert "state_dtype" not in done.err
    assert locks(here / "r")["recipe.lock.1.toml"] == before["recipe.lock.toml"]
    assert sorted(locks(here / "r")) == ["recipe.lock.1.toml", "recipe.lock.toml"]


@pytest.mark.parametrize(
    "change",
    [
        "dataset.infinite=false",
        'callbacks=[{type="tardy"}]',
    ],
)
def test_whatever_fails_before_the_first_step(train: Train, here: Path, change: str) -> None:
    """Of the data, and of a callback that raises when the run begins."""
    plugin = late(here)
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    before = locks(here / "r")
    failed = train("r", "--resume", "training.steps=4", change, *plugin)
    assert failed.code != 0
    assert locks(here / "r") == before
    assert train("r", "--resume").code == 0


@pytest.mark.ranks
def test_one_rank_fails(train_on: Train, here: Path) -> None:
    """Rank 1 alone cannot begin: rank 0 does not replace the recipe."""
    plugin = late(here)
    assert train_on(2, "tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    before = locks(here / "r")
    change = ("training.steps=4", 'callbacks=[{type="tardy", rank=1}]', *plugin)
    failed = train_on(2, "r", "--resume", *change)
    assert failed.code != 0 and "too late" in failed.err
    assert locks(here / "r") == before
    assert train_on(2, "r", "--resume", "training.steps=3").code == 0


LATE = '''
import torch

from titancli import component, hookimpl


@component("callback", "tardy", target="tardy:Raises")
class Late:
    """Raises when the run begins."""

    rank: int = 0


class Raises:
    def __init__(self, config, *, engine, run):
        self.rank = config.rank

    def run_start(self, step):
        from titancli.errors import TitanError

        if torch.distributed.get_rank() == self.rank:
            raise TitanError("too late")


@hookimpl
def titan_components():
    return [Late]
'''

WATCHING = '''
from pathlib import Path

from titancli import component, hookimpl


@component("logger", "watching", target="watching:build")
class Watching:
    """Notes the recipe of the run folder when the run begins."""


def build(config, *, run_folder, is_main):
    class Logger:
        def run_start(self, info):
            Path("seen").write_text((run_folder / "recipe.lock.toml").read_text())

    return Logger()


@hookimpl
def titan_components():
    return [Watching]
'''


def test_loggers_see_the_new_recipe(train: Train, here: Path) -> None:
    (here / "watching.py").write_text(WATCHING)
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    change = ("training.steps=4", 'loggers=["watching"]', "-p", "watching.py")
    done = train("r", "--resume", *change)
    assert done.code == 0, done.err
    assert "steps = 4" in (here / "seen").read_text()
    assert not (here / "r/recipe.next.toml").exists()


def test_killed_while_loading(train: Train, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command dies before the ranks have loaded: the plain resume takes the recipe from before."""
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    before = locks(here / "r")
    child = os.fork()
    if not child:
        from titancli.worker import data

        monkeypatch.setattr(data, "_continued", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        train("r", "--resume", "training.steps=4", "optimizer.lr=0.5")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert locks(here / "r")["recipe.lock.toml"] == before["recipe.lock.toml"]
    done = train("r", "--resume", "training.steps=3")
    assert done.code == 0, done.err
    now = locks(here / "r")
    assert "lr = 0.5" not in now["recipe.lock.toml"] and "steps = 3" in now["recipe.lock.toml"]
    assert now["recipe.lock.1.toml"] == before["recipe.lock.toml"] and len(now) == 2
    assert list(losses(here / "r")) == [1, 2, 3]


@pytest.mark.parametrize("writes", [0, 1])
def test_a_lock_is_whole_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Killed between the files of which a replacement consists: one of the two recipes is there, whole."""
    from titancli import runs

    folder = RunFolder.create("x", tmp_path / "r")
    folder.propose_recipe_lock("old\n")
    folder.propose_recipe_lock("new\n")
    assert folder.recipe_lock.read_text() == "old\n" and folder.lock_to_start.read_text() == "new\n"
    whole, left = runs.write_atomically, [writes]

    def dies(path: Path, text: str) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        whole(path, text)

    monkeypatch.setattr(runs, "write_atomically", dies)
    with pytest.raises(KeyboardInterrupt):
        folder.adopt_recipe_lock("new\n")
    monkeypatch.undo()
    assert folder.recipe_lock.read_text() == "old\n"
    folder.propose_recipe_lock("old\n")  # the plain resume
    assert folder.lock_to_start == folder.recipe_lock
    folder.propose_recipe_lock("new\n")
    folder.adopt_recipe_lock("new\n")
    assert folder.recipe_lock.read_text() == "new\n" == folder.lock_to_start.read_text()


def test_a_disk_that_is_full_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create("x", tmp_path / "r")
    folder.propose_recipe_lock("old\n")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(EnvironmentProblem, match="No space left"):
        folder.propose_recipe_lock("new\n")
    monkeypatch.undo()
    assert locks(folder.path) == {"recipe.lock.toml": "old\n"}


def test_nodes_do_not_replace_it_when_they_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT, "")
    folder = RunFolder(tmp_path / "r")
    for number, lock in enumerate(("first", "second")):
        own = RunFolder(tmp_path / str(number))
        own.path.mkdir()
        entry = {"token": str(number), "serial": 0, "from_scratch": False, "step": None}
        before = folder.record().get("attempts", [])
        own.write_record({"run_id": "r", "name": "n", "attempts": [*before, entry]})
        with ExitStack() as stack:
            take_part(folder, own.path, lock, stack, first_of_node=True)
        assert folder.recipe_lock.read_text() == "first"


def test_a_failed_attempt_does_not_count_as_the_last(train: Train, here: Path) -> None:
    """Its machine and its layout are not those that the run is compared with."""
    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    run = RunFolder(here / "r")
    run.update_attempt(mesh={**run.record()["attempts"][-1]["mesh"], "dp_shard": 2})  # as if on two ranks
    assert train("r", "--resume", "training.steps=4", STATE).code != 0
    assert [attempt["loaded"] for attempt in run.record()["attempts"]] == [True, False]
    done = train("r", "--resume", "training.steps=4")
    assert "changed: rows of a step: 4 -> 2" in done.err


def test_replays_know_the_recipe_of_each_attempt(train: Train, here: Path) -> None:
    """A failed change has left no recipe, so that it is not counted among those of a run."""
    from titan_proof.origin import origin_of

    assert train("tiny.toml", "--run-dir", "r", "training.steps=2").code == 0
    assert train("r", "--resume", "training.steps=4", STATE).code != 0
    assert train("r", "--resume", "training.steps=4").code == 0
    folder = RunFolder(here / "r")
    assert "steps = 2" in origin_of(folder, 1).recipe
    assert "steps = 4" in origin_of(folder, 3).recipe
