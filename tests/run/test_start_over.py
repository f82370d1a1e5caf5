"""A run that has checkpoints never starts over in silence, and never mixes with what it did before."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import Ranks
from tests.run import pool
from tests.run.conftest import Finished, trained
from titancli.checkpoint.format import files
from titancli.errors import EnvironmentProblem
from titancli.launch import LaunchRequest
from titancli.launchers import local
from titancli.process import Place
from titancli.provenance import package_versions
from titancli.recipe.schema import Checkpoint
from titancli.runs import ATTEMPT, RunFolder
from titancli.worker import joining, rank
from titancli.worker.resume import Resume

Train = Callable[..., Finished]
AGAIN = ("tiny.toml", "--run-dir", "r", "--resume", "training.steps=5")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trained(folder, "--run-dir", "saved", "training.steps=4")
    return folder / "saved"


@pytest.fixture
def run(saved: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Step 2 and step 4 of four."""
    monkeypatch.setattr(files, "PAUSES", (0.0, 0.0))
    monkeypatch.chdir(saved.parent)  # where its data are
    shutil.rmtree("r", ignore_errors=True)
    shutil.copytree(saved, "r")
    return saved.parent / "r"


def failing(monkeypatch: pytest.MonkeyPatch, part: str, number: int, times: int = 10**9) -> list[str]:
    """Reading a file with `part` in its path fails so often; what was attempted."""
    really, asked = os.open, []

    def fails(path: str | Path, *rest: int, **named: int) -> int:
        if part in str(path):
            asked.append(str(path))
            if len(asked) <= times:
                raise OSError(number, os.strerror(number))
        return really(path, *rest, **named)

    monkeypatch.setattr(os, "open", fails)
    return asked


def empty(run: Path) -> None:
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.unlink()


def damage(run: Path) -> None:
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_bytes(manifest.read_bytes()[:-9])


def of_another_format(run: Path) -> None:
    import xxhash

    for manifest in run.glob("checkpoints/*/manifest.json"):
        rest = manifest.read_bytes().partition(b"\n")[2].replace(b'"format": 1', b'"format": 2', 1)
        digest = xxhash.xxh3_64(rest).hexdigest().encode()
        manifest.write_bytes(b'{"xxh3_64": "%s",\n%s' % (digest, rest))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (empty, "it has no manifest.json"),
        (damage, "manifest.json is damaged"),
        (of_another_format, "has format 2, but this version of titan reads format 1"),
        (errno.ESTALE, "manifest.json cannot be read: Stale file handle"),
        (errno.EIO, "rank-00000.safetensors cannot be read: Input/output error"),
    ],
    ids=["absent", "damaged", "newer", "unreadable", "unreadable data"],
)
def test_checkpoints_that_cannot_be_used_are_no_reason_to_start_at_step_0(
    train: Train, run: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None] | int, words: str
) -> None:
    if isinstance(harm, int):
        failing(monkeypatch, "manifest.json" if harm == errno.ESTALE else ".safetensors", harm)
    else:
        harm(run)
    before = sorted(run.rglob("*"))
    for more in ((), ("--dry-run",)):
        done = train(*AGAIN, *more)
        assert done.code == 5, done.err
        for step in (2, 4):
            lines = [line for line in done.err.splitlines() if f"step-{step} is skipped" in line]
            assert lines and all(words in line for line in lines)
        assert "--from-scratch" in done.err
        assert "Traceback" not in done.err
        if harm == errno.EIO and not more:  # the ranks have found it, and run.json has an attempt more
            assert sorted((run / "checkpoints").iterdir()) == [
                run / "checkpoints" / f"step-{n}" for n in (2, 4)
            ]
            before = sorted(run.rglob("*"))
    assert sorted(run.rglob("*")) == before


def test_from_scratch_sets_them_aside_and_starts_at_step_0(train: Train, run: Path) -> None:
    damage(run)
    done = train(*AGAIN, "checkpoint.keep_latest_k=2", "--from-scratch")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (run / "checkpoints.1").glob("step-*")) == ["step-2", "step-4"]
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-4", "step-5"]
    assert RunFolder(run).record()["attempts"][-1]["from_scratch"] is True
    done = train("r", "--resume", "--from-scratch", "training.steps=6")  # what is good is taken all the same
    assert done.code == 0, done.err
    assert "from step-5" in done.err
    assert not (run / "checkpoints.2").exists()
    assert (
        train("r", "--from-scratch").code == train("r", "--resume", "--step", "4", "--from-scratch").code == 2
    )


def purge(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path)


def unmount(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def kill(run: Path) -> None:
    """No outcome, so that only the event log knows."""
    purge(run)
    RunFolder(run).update_attempt(outcome=None)


def lose_events(run: Path) -> None:
    purge(run)
    (run / "events.jsonl").unlink()


def leave_a_draft(run: Path) -> None:
    purge(run)
    (run / "checkpoints/.step-4.tmp-0-0").mkdir()


@pytest.mark.parametrize("harm", [purge, unmount, kill, lose_events, leave_a_draft])
def test_checkpoints_that_are_gone_are_no_reason_to_start_at_step_0(
    train: Train, run: Path, harm: Callable[[Path], None]
) -> None:
    harm(run)
    before = (run / "run.json").read_bytes()
    for line in (AGAIN, ("r", "--resume"), (*AGAIN, "--dry-run")):
        done = train(*line)
        assert done.code == 5, done.err
        what = "does not exist" if harm == unmount else "holds no checkpoint"
        assert f"has saved step 4 according to its record, but {run}/checkpoints {what}" in done.err
        assert "not mounted" in done.err and "--from-scratch" in done.err
    assert (run / "run.json").read_bytes() == before


def test_a_run_whose_checkpoints_are_gone_starts_over_when_that_is_wanted(train: Train, run: Path) -> None:
    purge(run)
    done = train(*AGAIN, "--from-scratch", "checkpoint.enable=false")
    assert done.code == 0, done.err
    assert "nothing is left of step 4" in done.err
    assert not (run / "checkpoints.1").exists()  # nothing was there to be set aside
    done = train(*AGAIN)  # what was saved before the new start counts no more, and nothing was saved since
    assert done.code == 0, done.err
    purge(run)
    assert "has saved step 5" in train(*AGAIN).err


def test_the_store_is_asked_before_a_start_is_refused(train: Train, run: Path) -> None:
    store = f"checkpoint.remote=file://{run.parent}/store"
    shutil.rmtree(run.parent / "store", ignore_errors=True)
    purge(run)
    done = train(*AGAIN, store)
    assert done.code == 5, done.err
    assert f"file://{run.parent}/store/r holds none either" in done.err
    assert train(*AGAIN, store, "--from-scratch").code == 0
    purge(run)
    done = train(*AGAIN, store, "training.steps=6")
    assert done.code == 0, done.err
    assert "from step-5" in done.err


def test_ranks_do_not_start_over_where_the_checkpoints_are_gone(run: Path) -> None:
    purge(run)
    for restart in (0, 1):
        with pytest.raises(EnvironmentProblem, match="has saved step 4"):
            rank.main(run, place=Place(restart=restart))


def test_ranks_that_start_anew_take_what_is_gone_from_the_store(train: Train, run: Path) -> None:
    section = Checkpoint(remote=f"file://{run.parent}/store")
    shutil.rmtree(run.parent / "store", ignore_errors=True)
    shutil.copytree(run / "checkpoints", run.parent / "store/r")
    purge(run)
    RunFolder(run).update_attempt(serial=0)
    again = Resume(RunFolder(run), Place(restart=1))
    assert again.checkpoint(None, section) == run / "checkpoints/step-4"


def test_an_error_of_the_disk_that_passes_is_not_told(
    train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = failing(monkeypatch, "step-4/manifest.json", errno.ESTALE, times=2)
    done = train(*AGAIN)
    assert done.code == 0, done.err
    assert "from step-4" in done.err
    assert "is skipped" not in done.err
    assert len(asked) > 2


def test_a_data_file_that_the_disk_does_not_give_is_passed_over_as_a_damaged_one_is(
    train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "step-4/rank-00000.safetensors", errno.EIO)
    done = train(*AGAIN)
    assert done.code == 0, done.err
    assert "step-4 is skipped" in done.err
    assert "Input/output error" in done.err
    assert "from step-2" in done.err


def test_ranks_that_start_anew_do_not_start_over_either(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(run)
    folder.update_attempt(serial=0)
    again = Resume(folder, Place(restart=1))
    assert again.checkpoint(None, Checkpoint()) == run / "checkpoints/step-4"
    damage(run)
    with pytest.raises(EnvironmentProblem, match=r"(?s)none of them can be used:.*step-4.*step-2"):
        again.checkpoint(None, Checkpoint())
    shutil.rmtree(run / "checkpoints")
    assert again.checkpoint(None, Checkpoint()) is None


def test_checkpoints_that_appear_after_a_start_at_step_0_are_neither_replaced_nor_purged(
    train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's stale view of the folder showed none of them."""
    from titancli.checkpoint.format import manifest

    really, looks = manifest._step_folders, []

    def stale(folder: Path) -> list[Path]:
        looks.append(folder)
        return really(folder) if (run / "logs/stale").exists() else []

    monkeypatch.setattr(manifest, "_step_folders", stale)
    RunFolder(run).update_attempt(outcome=None)
    (run / "events.jsonl").unlink()  # nor did its view of the record
    from titancli.loops.run import Run

    step_done = Run.step_done

    def seen_again(self: Run, step: int) -> None:
        (run / "logs/stale").touch()
        step_done(self, step)

    monkeypatch.setattr(Run, "step_done", seen_again)
    before = {path: path.stat().st_ino for path in (run / "checkpoints").iterdir()}
    done = train(*AGAIN, "checkpoint.keep_latest_k=1")
    assert looks
    assert done.code == 5, done.err
    assert "were not there when the run started at step 0 (step-2, step-4)" in done.err
    assert {path: path.stat().st_ino for path in (run / "checkpoints").iterdir()} == before


def test_a_launcher_records_no_outcome_of_another_attempt(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(run)
    request = LaunchRequest(
        run_folder=run,
        lock_file=folder.recipe_lock,
        checkpoint=None,
        plugin_files=[],
        nproc=1,
        nnodes=1,
        rdzv=None,
        json_events=False,
        traceback=False,
    )
    for token in ("another", folder.record()["attempts"][-1]["token"]):
        folder.update_attempt(outcome=None)
        monkeypatch.setenv(ATTEMPT, token)
        local._record_outcome(request, lambda event: None, "failed", None, 2, "it fell over")
        assert (folder.outcome() is None) == (token == "another")


def other_versions(folder: Path, port: int) -> Any:
    joining.package_versions = lambda: {"torch": f"2.1{dist.get_rank()}"}
    try:
        return pool.run_rank(folder, None, [], port)
    finally:
        joining.package_versions = package_versions


@pytest.mark.ranks
def test_ranks_with_other_versions_do_not_start(ranks: Ranks, run: Path) -> None:
    for error in ranks(2, other_versions, run, pool.free_port()):
        assert isinstance(error, EnvironmentProblem)
        assert "the ranks were started with different versions" in error.message
        assert "torch 2.10" in error.message and "torch 2.11" in error.message


def other_plugin_files(folder: Path, port: int) -> Any:
    file = folder.parent / str(dist.get_rank()) / "of_a_node.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"VALUE = {dist.get_rank()}\n")
    return pool.run_rank(folder, None, [file], port)


@pytest.mark.ranks
def test_ranks_with_other_plugin_files_do_not_start(ranks: Ranks, run: Path) -> None:
    for error in ranks(2, other_plugin_files, run, pool.free_port()):
        assert isinstance(error, EnvironmentProblem)
        assert "the ranks were started with different plugin files" in error.message
        assert error.message.count("of_a_node.py (SHA-256 ") == 2
