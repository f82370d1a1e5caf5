"""When checkpoints are saved, that training may go on meanwhile, and which are purged."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.tensors import RUN, same, save, some_tensors, zeros
from titancli.checkpoint import Checkpointer, load_checkpoint, newest, read_manifest
from titancli.checkpoint import checkpointer as module
from titancli.checkpoint.format.manifest import STEP_NAME
from titancli.checkpoint.save import Draft
from titancli.errors import EnvironmentProblem, TitanError
from titancli.recipe.schema import Checkpoint

MODES = ["disabled", "async", "async_with_pinned_mem"]


def make(folder: Path, saved: list[int] | None = None, **section: object) -> Checkpointer:
    told = [] if saved is None else saved
    return Checkpointer(
        folder,
        Checkpoint(**section),  # type: ignore[arg-type]
        lock_text="recipe = 1\n",
        run_id=RUN,
        on_saved=lambda step, path: told.append(step),
    )


def steps_in(folder: Path) -> list[int]:
    return sorted(int(match[1]) for path in folder.iterdir() if (match := STEP_NAME.match(path.name)))


def test_a_checkpoint_is_due_at_the_interval(tmp_path: Path):
    checkpointer = make(tmp_path, interval=3)
    assert [step for step in range(1, 10) if checkpointer.due(step)] == [3, 6, 9]


def test_the_first_step_is_due_as_well_where_that_is_wanted(tmp_path: Path):
    checkpointer = make(tmp_path, interval=3, enable_first_step_checkpoint=True)
    assert [step for step in range(1, 8) if checkpointer.due(step)] == [1, 3, 6]


def test_nothing_is_saved_where_checkpoints_are_off(tmp_path: Path):
    checkpointer = make(tmp_path, enable=False, interval=1)
    assert not checkpointer.due(1)
    checkpointer.save(1, some_tensors(), {})
    checkpointer.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", MODES)
def test_what_is_saved_is_the_state_of_its_step(tmp_path: Path, mode: str):
    """Training changes the tensors in place right after `save` returns."""
    saved: list[int] = []
    checkpointer = make(tmp_path, saved, interval=1, async_mode=mode)
    tensors = some_tensors()
    for step in (1, 2, 3):
        with torch.no_grad():
            tensors["model.layers.0.weight"].fill_(step)
        checkpointer.save(step, tensors, {"step": step})
        with torch.no_grad():
            tensors["model.layers.0.weight"].fill_(-1)
    checkpointer.wait()
    assert saved == [1, 2, 3]
    for step in (1, 2, 3):
        loaded = zeros(tensors)
        assert load_checkpoint(tmp_path / f"step-{step}", loaded) == {"step": step}
        assert same(loaded, tensors | {"model.layers.0.weight": torch.full((6, 4), float(step))})


def test_an_asynchronous_save_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()
    really = module.run_save

    def slow(*args: object) -> None:
        assert gate.wait(30)
        really(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "run_save", slow)
    saved: list[int] = []
    checkpointer = make(tmp_path, saved, interval=1, async_mode="async")
    checkpointer.save(1, some_tensors(), {})
    assert checkpointer.due(2)
    assert saved == []
    assert newest(tmp_path) is None
    gate.set()
    checkpointer.wait()
    assert saved == [1]
    assert newest(tmp_path) == tmp_path / "step-1"


def test_a_finished_save_is_announced_at_the_next_step(tmp_path: Path):
    saved: list[int] = []
    checkpointer = make(tmp_path, saved, interval=1, async_mode="async")
    checkpointer.save(1, some_tensors(), {})
    checkpointer._writing.join()  # type: ignore[union-attr]
    checkpointer.due(2)
    assert saved == [1]
    checkpointer.wait()
    assert saved == [1]


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_save_is_told_and_the_next_one_works(tmp_path: Path, mode: str):
    folder = tmp_path / "checkpoints"
    save(folder / "step-1")
    save(folder / "step-2", run_id="theirs")
    checkpointer = make(folder, interval=1, async_mode=mode)
    with pytest.raises(EnvironmentProblem, match="another run"):
        checkpointer.save(2, some_tensors(), {})
        checkpointer.save(3, some_tensors(), {})
    assert steps_in(folder) == [1, 2]
    checkpointer.save(3, some_tensors(), {})
    checkpointer.wait()
    assert steps_in(folder) == [1, 2, 3]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_an_error_that_nobody_foresaw_in_the_thread_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*args: object) -> None:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(module, "run_save", broken)
    checkpointer = make(tmp_path, interval=1, async_mode="async")
    checkpointer.save(1, some_tensors(), {})
    with pytest.raises(TitanError, match="the store is gone"):
        checkpointer.wait()
    checkpointer.wait()


def test_a_step_is_not_saved_twice_in_a_row(tmp_path: Path):
    saved: list[int] = []
    checkpointer = make(tmp_path, saved, interval=1)
    checkpointer.save(1, some_tensors(), {})
    checkpointer.save(1, some_tensors(), {})
    assert saved == [1]


@pytest.mark.parametrize("mode", MODES)
def test_the_latest_k_are_kept(tmp_path: Path, mode: str):
    checkpointer = make(tmp_path, interval=1, keep_latest_k=2, async_mode=mode)
    for step in range(1, 6):
        checkpointer.save(step, some_tensors(), {})
    checkpointer.wait()
    assert steps_in(tmp_path) == [4, 5]
    assert not list(tmp_path.glob(".*"))


def test_zero_keeps_all(tmp_path: Path):
    checkpointer = make(tmp_path, interval=1, keep_latest_k=0)
    for step in range(1, 6):
        checkpointer.save(step, some_tensors(), {})
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


def test_purging_touches_nothing_that_this_run_did_not_write(tmp_path: Path):
    save(tmp_path / "step-1", run_id="theirs")
    save(tmp_path / "my-best-step-2")  # ours, under a name of the user's own
    for name in ("step-3", "step-four", "old-step-5"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-6").write_text("a file")
    save(tmp_path / "elsewhere" / "step-0")
    (tmp_path / "step-0").symlink_to(tmp_path / "elsewhere" / "step-0")
    before = {path.name for path in tmp_path.iterdir()}
    checkpointer = make(tmp_path, interval=1, keep_latest_k=1)
    for step in (7, 8, 9):
        checkpointer.save(step, some_tensors(), {})
    assert {path.name for path in tmp_path.iterdir()} == before | {"step-9"}


def test_what_does_not_verify_gets_no_name_and_nothing_is_purged_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A shared disk that loses the end of a file, after it was written."""
    checkpointer = make(tmp_path, interval=1, keep_latest_k=1)
    checkpointer.save(1, some_tensors(), {})
    really = Draft.complete

    def harmed(self: Draft, *given: Any) -> None:
        [data] = tmp_path.glob(".step-2.tmp-*/rank-00000.safetensors")
        data.write_bytes(data.read_bytes()[:-1])
        really(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "complete", harmed)
        with pytest.raises(
            EnvironmentProblem, match=r"step-2 differs from what was written: rank-00000\.safet"
        ):
            checkpointer.save(2, some_tensors(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    checkpointer.save(3, some_tensors(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_the_newest_is_the_one_written_last_also_after_going_back(tmp_path: Path):
    """A run that was taken back to step 10 and saves step 15 goes on from there, not from the old step 30."""
    for step in (10, 20, 30):
        save(tmp_path / f"step-{step}", seed=step)
    checkpointer = make(tmp_path, interval=5, keep_latest_k=3)
    checkpointer.save(15, some_tensors(), {})
    assert newest(tmp_path) == tmp_path / "step-15"
    assert steps_in(tmp_path) == [15, 20, 30]
    assert read_manifest(tmp_path / "step-15").serial == 4
