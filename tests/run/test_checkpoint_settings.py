"""`[checkpoint]` of a recipe as a run obeys it: what is verified, what a save that fails means."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished, losses
from titancli.errors import EnvironmentProblem
from titancli.process import Place
from titancli.recipe.schema import Checkpoint
from titancli.runs import RunFolder
from titancli.worker.resume import Resume

Train = Callable[..., Finished]

FULL, SIZE = Checkpoint(), Checkpoint(verify="size")


def _damage(checkpoint: Path, name: str = "rank-00000.safetensors") -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[-1] ^= 1
    (checkpoint / name).write_bytes(data)


def test_a_resume_names_the_bad_checkpoint_in_one_line_and_takes_the_last_good_one(
    train: Train, here: Path
) -> None:
    assert train("tiny.toml", "--run-dir", "r").code == 0
    before = losses(here / "r")
    _damage(here / "r/checkpoints/step-6")
    (here / "r/events.jsonl").unlink()
    done = train("r", "--resume")
    assert done.code == 0, done.err
    [line] = [line for line in done.err.splitlines() if "step-6 is skipped" in line]
    assert "rank-00000.safetensors is damaged" in line
    assert "from step-4" in done.err
    assert losses(here / "r") == {step: before[step] for step in (5, 6)}
    assert train("r", "--resume", "training.steps=7").code == 0  # the bad one was replaced by a good one


def test_a_bad_checkpoint_that_was_asked_for_is_refused(train: Train, here: Path) -> None:
    assert train("tiny.toml", "--run-dir", "r").code == 0
    _damage(here / "r/checkpoints/step-4")
    done = train("r", "--resume", "--step", "4")
    assert done.code == 5
    assert "rank-00000.safetensors is damaged" in done.err
    assert "--step N" in done.err


@pytest.mark.parametrize("verify", ["size", "off"])
def test_checksums_are_not_compared_where_the_recipe_says_so(train: Train, here: Path, verify: str) -> None:
    assert train("tiny.toml", "--run-dir", "r", f"checkpoint.verify={verify}").code == 0
    _damage(here / "r/checkpoints/step-6")
    done = train("r", "--resume", "training.steps=7")
    assert done.code == 0, done.err
    assert "from step-6" in done.err
    _damage(here / "r/checkpoints/step-7")
    with open(here / "r/checkpoints/step-7/rank-00000.safetensors", "ab") as file:
        file.write(b"\0")
    done = train("r", "--resume", "training.steps=8")
    assert done.code == 0
    assert ("step-7 is skipped: rank-00000.safetensors has" in done.err) == (verify == "size")


def test_ranks_that_start_anew_pass_over_a_bad_checkpoint_in_one_line(
    train: Train, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert train("tiny.toml", "--run-dir", "r").code == 0
    folder = RunFolder(here / "r")
    (folder.checkpoints / "step-6" / "recipe.lock.toml").write_text("")
    folder.update_attempt(serial=0)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="titancli"):
        again = Resume(folder, Place(restart=1))
        assert again.checkpoint(None, SIZE) == folder.checkpoints / "step-4"
        [line] = caplog.messages
        assert line.startswith("checkpoint step-6 is skipped: recipe.lock.toml has 0 bytes")
        assert again.checkpoint(None, Checkpoint(verify="off")) == folder.checkpoints / "step-6"
        first = Resume(folder, Place())
        assert first.checkpoint(folder.checkpoints / "step-4", SIZE) == folder.checkpoints / "step-4"


def test_ranks_that_find_their_checkpoint_damaged_take_the_one_before(train: Train, here: Path) -> None:
    """Which that is depends on what the ranks were to go on from; all that was built goes with it."""
    assert train("tiny.toml", "--run-dir", "r").code == 0
    folder = RunFolder(here / "r")
    bad = {folder.checkpoints / "step-6": "it is bad"}
    first, again = Resume(folder, Place()), Resume(folder, Place(restart=1))
    assert first.checkpoint(folder.checkpoints / "step-6", SIZE, bad) == folder.checkpoints / "step-4"
    assert again.checkpoint(folder.checkpoints / "step-2", SIZE, bad) == folder.checkpoints / "step-4"
    folder.update_attempt(serial=3)  # all of them were there before
    assert again.checkpoint(folder.checkpoints / "step-2", SIZE, bad) == folder.checkpoints / "step-2"
    bad |= {folder.checkpoints / f"step-{step}": "it is bad" for step in (2, 4)}
    with pytest.raises(EnvironmentProblem, match="none of them can be used") as caught:
        first.checkpoint(folder.checkpoints / "step-6", SIZE, bad)
    assert "--from-scratch" in str(caught.value.hint)


@pytest.mark.ranks
def test_all_ranks_fall_back_where_one_finds_damage(train_on: Train, reference: Train, here: Path) -> None:
    """Only rank 1 reads what is damaged, while the tensors of both are being filled."""
    before, folder = reference(2)
    shutil.copytree(folder, here / "r")
    _damage(here / "r/checkpoints/step-6", "rank-00001.safetensors")
    done = train_on(2, "r", "--resume", "training.steps=7")
    assert done.code == 0, done.err
    assert "step-6 is skipped: rank-00001.safetensors is damaged" in done.err
    assert "the run continues from step-4" in done.err
    assert losses(here / "r")[5] == before[5]  # the rates after it depend on the number of steps
    done = train_on(2, "r", "--resume", "--from-scratch", "training.steps=8")  # the launcher reads every byte
    assert done.code == 0 and "is skipped" not in done.err, done.err


def test_ranks_that_start_anew_stay_on_the_way_that_was_chosen(train: Train, here: Path) -> None:
    """`--step 4` leaves step 6 behind: nobody wants it back because a rank died."""
    assert train("tiny.toml", "--run-dir", "r").code == 0
    assert train("r", "--resume", "--step", "4", "training.steps=5").code == 0
    folder = RunFolder(here / "r")
    again = Resume(folder, Place(restart=1))
    assert again.checkpoint(folder.checkpoints / "step-4", FULL) == folder.checkpoints / "step-5"
    shutil.rmtree(folder.checkpoints / "step-5")
    assert again.checkpoint(folder.checkpoints / "step-4", FULL) == folder.checkpoints / "step-4"


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_save_that_fails_ends_the_run_or_does_not(
    train: Train, here: Path, monkeypatch: pytest.MonkeyPatch, mode: str, on_error: str
) -> None:
    """The disk says no at the first save, and has room again at the second."""
    from titancli.checkpoint import save

    calls = []

    def need(folder: Path, needed: int) -> None:
        calls.append(needed)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "need", need)
    done = train(
        "tiny.toml", "--run-dir", "r", f"checkpoint.async_mode={mode}", f"checkpoint.on_error={on_error}"
    )
    assert "step-2 cannot be written: No space left on device" in done.err
    saved = {path.name for path in (here / "r/checkpoints").glob("step-*")}
    if on_error == "continue":
        assert done.code == 0, done.err
        assert saved == {"step-4", "step-6"}
    else:
        assert done.code == 5
        assert saved == set()
        assert "Traceback" not in done.err
        assert train("r", "--resume").code == 5  # there is nothing to go on from
        shutil.rmtree(here / "r")
