"""Damaged files, full disks, and processes that die: nothing bad is loaded, nothing good is lost."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.tensors import same, save, some_tensors, zeros
from titancli.checkpoint import Checkpointer, CheckpointReader, load_checkpoint, newest, newest_good
from titancli.errors import EnvironmentProblem
from titancli.recipe.schema import Checkpoint

FILES = [
    "rank-00000.safetensors",
    "metadata-00000.json.gz",
    "metadata.json",
    "manifest.json",
    "recipe.lock.toml",
]
PAGE = 4096


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    place = chance.randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def _truncate(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def _zero(path: Path, chance: random.Random) -> None:
    """A page that was lost. Most files here have one alone, the tensors' has five."""
    data = bytearray(path.read_bytes())
    start = PAGE * chance.randrange(-(-len(data) // PAGE))
    page = data[start : start + PAGE]
    assert any(page)
    data[start : start + PAGE] = bytes(len(page))
    path.write_bytes(data)


def _grow(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _remove(path: Path, chance: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [_flip, _truncate, _zero, _grow, _remove])
@pytest.mark.parametrize("name", FILES)
def test_any_harm_is_found_the_file_named_and_the_one_before_taken(
    tmp_path: Path, name: str, harm: Callable[[Path, random.Random], None]
):
    chance = random.Random(f"{name}{harm.__name__}")
    for round_ in range(3):
        folder = tmp_path / str(round_)
        older = save(folder / "step-1", seed=1)
        newer = save(folder / "step-2", seed=2)
        harm(folder / "step-2" / name, chance)
        tensors = zeros(newer)
        with pytest.raises(EnvironmentProblem, match=name):
            load_checkpoint(folder / "step-2", tensors)
        # Data are hashed on their way into the tensors; all else is known before any is read.
        assert same(tensors, zeros(newer)) or (name == FILES[0] and harm in (_flip, _zero))
        with pytest.raises(EnvironmentProblem, match=name):
            CheckpointReader(folder / "step-2")
        told: list[str] = []
        assert newest_good(folder, rejected=told.append) == folder / "step-1"
        assert len(told) == 1
        assert "step-2" in told[0]
        assert name in told[0]
        assert "\n" not in told[0]
        load_checkpoint(folder / "step-1", tensors)
        assert same(tensors, older)


def test_an_extra_file_is_named(tmp_path: Path):
    save(tmp_path / "step-1")
    (tmp_path / "step-1" / "rank-00001.safetensors").write_bytes(b"")
    with pytest.raises(EnvironmentProblem, match=r"rank-00001\.safetensors is not listed in the manifest"):
        CheckpointReader(tmp_path / "step-1")


def test_what_a_network_disk_leaves_of_a_deleted_file_is_no_extra_file(tmp_path: Path):
    save(tmp_path / "step-1")
    (tmp_path / "step-1" / ".nfs0000000012345678").write_bytes(b"")
    assert CheckpointReader(tmp_path / "step-1").names()


def test_without_checksums_only_sizes_are_looked_at(tmp_path: Path):
    save(tmp_path / "step-1", seed=1)
    save(tmp_path / "step-2", seed=2)
    _flip(tmp_path / "step-2" / FILES[0], random.Random(0))
    assert newest_good(tmp_path, verify="size") == newest_good(tmp_path, verify="off") == tmp_path / "step-2"
    _grow(tmp_path / "step-2" / FILES[0], random.Random(0))
    assert newest_good(tmp_path, verify="size") == tmp_path / "step-1"
    assert newest_good(tmp_path, verify="off") == tmp_path / "step-2"


def test_no_good_checkpoint_is_none(tmp_path: Path):
    assert newest(tmp_path / "missing") is None
    assert newest_good(tmp_path) is None
    save(tmp_path / "step-1")
    (tmp_path / "step-1" / "metadata.json").unlink()
    told: list[str] = []
    assert newest_good(tmp_path, rejected=told.append) is None
    assert told == ["checkpoint step-1 is skipped: metadata.json is missing"]


def test_a_checkpoint_that_cannot_be_read_now_is_not_the_newest_when_it_can(tmp_path: Path):
    for step in (1, 2):
        save(tmp_path / f"step-{step}")
    path = tmp_path / "step-2" / "manifest.json"
    manifest = path.read_bytes()
    path.write_bytes(b"")
    save(tmp_path / "step-3")
    path.write_bytes(manifest)
    assert newest(tmp_path) == tmp_path / "step-3"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(EnvironmentProblem, match="checkpoints/step-1 cannot be written"):
        save(tmp_path / "checkpoints" / "step-1")


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path / "step-1")

    class Usage:
        free = 100

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(EnvironmentProblem, match=r"It needs [\d.]+ kB, and 100 bytes is free") as caught:
        save(tmp_path / "step-2")
    assert caught.value.exit_code == 5
    assert "keep_latest_k" in str(caught.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def _tensors(step: int, numbers: int = 1 << 12) -> dict[str, torch.Tensor]:
    return {f"model.{i}": torch.full((numbers,), float(step)) for i in range(16)}


def _fill_the_disk(folder: Path, mode: str, told: Path) -> None:
    """RLIMIT_FSIZE stands for a quota: the kernel refuses bytes in the middle of a file."""
    section = Checkpoint(interval=1, async_mode=mode)  # type: ignore[arg-type]
    checkpointer = Checkpointer(folder, section, lock_text="", run_id="r")

    def save(step: int) -> None:
        checkpointer.save(step, _tensors(step, 1 << 16), {"step": step})
        checkpointer.wait()

    save(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        save(2)
    except EnvironmentProblem as error:
        told.write_text(f"{error.message}\n{sorted(path.name for path in folder.iterdir())}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    save(3)
    os._exit(0)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_leaves_the_last_good_one_and_the_run_goes_on(tmp_path: Path, mode: str):
    folder = tmp_path / "checkpoints"
    child = _fork(_fill_the_disk, folder, mode, tmp_path / "told")
    assert os.waitpid(child, 0)[1] == 0
    message, listing = (tmp_path / "told").read_text().splitlines()
    assert f"{folder / 'step-2'} cannot be written: File too large" in message
    assert "It needs 4.2 MB" in message
    assert "is free" in message
    assert listing == "['step-1']"
    assert CheckpointReader(folder / "step-1").read("model.0")[0] == 1
    assert CheckpointReader(folder / "step-3").read("model.0")[0] == 3


def _save_for_ever(folder: Path, mode: str, step: int, over: bool) -> None:
    section = Checkpoint(interval=1, keep_latest_k=2, async_mode=mode)  # type: ignore[arg-type]
    checkpointer = Checkpointer(folder, section, lock_text="", run_id="r")
    while True:
        step += 1
        checkpointer.save(1 if over else step, _tensors(step), {"step": step})
        checkpointer.wait()
        checkpointer._saved = None


def _fork(function: Callable[..., None], *args: object) -> int:
    """A copy of this process that runs a function; torch need not be imported again."""
    if child := os.fork():
        return child
    try:
        function(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("where", ["on", "over"])
def test_kill_9_at_any_moment_leaves_a_good_checkpoint(
    tmp_path: Path, record_property, mode: str, where: str
):
    """`on`: step after step, with purging; `over`: one folder replaced again and again."""
    chance = random.Random(f"{mode}{where}")
    step = 0
    kills = 8
    record_property("killed saves", kills)
    for _ in range(kills):
        child = _fork(_save_for_ever, tmp_path, mode, step, where == "over")
        while newest(tmp_path) is None:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        good = newest_good(tmp_path)
        assert good is not None
        assert good == newest(tmp_path)
        reader = CheckpointReader(good)
        found = int(reader.manifest.state["step"])
        assert found >= step
        assert all((reader.read(name) == found).all() for name in reader.names())
        step = found
    # The next run of the same id clears up what the killed ones left.
    save(tmp_path / "step-1000000", run_id="r")
    assert not list(tmp_path.glob(".*"))


def _die_instead_of_purging(folder: Path) -> None:
    from titancli.checkpoint import checkpointer as module

    module.purge = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    checkpointer = Checkpointer(folder, Checkpoint(interval=1, keep_latest_k=1), lock_text="", run_id="r")
    checkpointer.save(2, _tensors(2), {"step": 2})


def test_a_kill_between_the_rename_and_the_purge_leaves_both(tmp_path: Path):
    first = Checkpointer(tmp_path, Checkpoint(interval=1, keep_latest_k=1), lock_text="", run_id="r")
    first.save(1, _tensors(1), {"step": 1})
    child = _fork(_die_instead_of_purging, tmp_path)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert newest_good(tmp_path) == tmp_path / "step-2"
    for step in (1, 2):
        loaded = _tensors(0)
        assert load_checkpoint(tmp_path / f"step-{step}", loaded) == {"step": step}
        assert same(loaded, _tensors(step))
    first.save(3, _tensors(3), {"step": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_an_interrupted_save_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever stands under a hidden name, even a whole checkpoint, is not looked at."""
    save(tmp_path / "step-1", seed=1)
    save(tmp_path / "step-2", seed=2)
    (tmp_path / "step-2").rename(tmp_path / ".step-2.tmp-01234567-89abcdef")
    assert newest(tmp_path) == newest_good(tmp_path) == tmp_path / "step-1"
    loaded = zeros(some_tensors())
    assert load_checkpoint(tmp_path / "step-1", loaded) == {"seed": 1}
