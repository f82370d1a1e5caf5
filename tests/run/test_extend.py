"""What a resume changes, in numbers; and `titan recipe extend`, which shows ways to continue a run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished, in_this_process, trained
from titancli.observe.events import read_events
from titancli.optimizers import WarmupStableDecay
from titancli.optimizers.schedule import build

Train = Callable[..., Finished]

LINEAR = ("training.steps=4", "lr_scheduler.min_lr_factor=0.0", "optimizer.lr=1e-3")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps, whose learning rate has decayed."""
    folder = tmp_path_factory.mktemp("finished")
    trained(folder, "--run-dir", "r", *LINEAR)
    return folder


@pytest.fixture
def finished(once: Path, here: Path) -> Path:
    shutil.copytree(once / "r", here / "r", symlinks=True)
    return here


@pytest.fixture
def titan(here: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    return in_this_process(capfd)


def rates(run: Path) -> dict[int, float]:
    """Return the learning rate of each step, as the run itself logged it."""
    steps = (e for e in read_events(run / "events.jsonl") if e["event"] == "step")
    return {event["step"]: event["metrics"]["lr"] for event in steps}


def test_the_rate_that_jumps_is_said(train: Train, finished: Path) -> None:
    done = train("r", "--resume", "training.steps=8")
    assert done.code == 0, done.err
    line = next(line for line in done.err.splitlines() if "learning rate at step 5" in line)
    logged = rates(finished / "r")
    assert line == (
        f"changed: learning rate at step 5: 0.00e+00 -> {logged[5]:.2e}; step 4 had {logged[4]:.2e}"
    )
    assert logged[5] > 1.5 * logged[4]
    assert "changed: steps to come: 0 -> 4 (0 -> 256 tokens)" in done.err


def test_a_plain_resume_is_silent(train: Train, finished: Path) -> None:
    shutil.rmtree(finished / "r/checkpoints/step-4")
    done = train("r", "--resume")
    assert done.code == 0, done.err
    assert "changed:" not in done.err


def test_batch_and_length_are_said(train: Train, finished: Path) -> None:
    changes = ("training.steps=6", "training.local_batch_size=3", "training.seq_len=16")
    done = train("r", "--resume", *changes, "--dry-run")
    assert "rows of a step: 2 -> 3" in done.out
    assert "tokens of a step: 64 -> 48" in done.out
    assert "steps to come: 0 -> 2 (0 -> 96 tokens)" in done.out
    assert re.search(r"learning rate at step 5: \S+ -> \S+; step 4 had", done.out)


def test_the_rate_of_epochs_is_said(train: Train, here: Path) -> None:
    (here / "text.txt").write_text("a line\n" * 40)
    assert train("tiny.toml", "--run-dir", "e", "--unset", "training.steps", "training.epochs=1").code == 0
    done = train("e", "--resume", "training.epochs=2")
    assert done.code == 0, done.err
    step = max(rates(here / "e")) // 2 + 1
    found = re.search(rf"learning rate at step {step}: \S+ -> (\S+);", done.err)
    assert found, done.err
    assert found[1] == f"{rates(here / 'e')[step]:.2e}"


def test_epochs_after_another_batch(train: Train, here: Path) -> None:
    """Steps before the resume count as they were: 4 of 64 tokens, and 4 of 128."""
    assert train("tiny.toml", "--run-dir", "r", "training.steps=4").code == 0
    done = train("r", "--resume", "training.steps=8", "training.local_batch_size=4")
    epochs, tokens = re.search(r"(\S+) epochs of ([\d,]+) tokens", done.err).groups()  # type: ignore[union-attr]
    assert float(epochs) == pytest.approx((4 * 64 + 4 * 128) / int(tokens.replace(",", "")), rel=0.05)


# ------------------------------------------------------------------------------------------------- extend


def test_each_way_does_as_it_says(titan: Train, finished: Path) -> None:
    """Each command is pasted; the rates that the run logs are those that were announced."""
    done = titan("recipe", "extend", "r", "--steps", "8", "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    assert [way["name"] for way in found["ways"]] == ["stretch", "hold", "warm_up", "decay"]
    last = rates(finished / "r")[4]
    shutil.copytree(finished / "r", finished / "whole")
    for way in found["ways"]:
        shutil.rmtree(finished / "r")
        shutil.copytree(finished / "whole", finished / "r")
        program, *words = shlex.split(way["command"])
        done = titan(*words)
        assert program == "titan" and done.code == 0, done.err
        logged = rates(finished / "r")
        assert max(logged) == 8
        for point in way["learning_rate"]:
            assert logged[point["step"]] == pytest.approx(point["lr"], rel=1e-5), way["name"]
        new = [logged[step] for step in range(5, 9)]
        if way["name"] == "hold":
            assert new == pytest.approx([last] * 4, rel=1e-5)
        if way["name"] == "decay":
            assert (
                new[0] == pytest.approx(last, rel=1e-5)
                and new == sorted(new, reverse=True)
                and new[-1] < last
            )
        if way["name"] == "warm_up":
            assert new == pytest.approx([1e-3, 1e-3, 0.75e-3, 0.25e-3], rel=1e-5)


def test_extend_in_words(titan: Train, finished: Path) -> None:
    before = (finished / "r/recipe.lock.toml").read_bytes()
    done = titan("recipe", "extend", "r", "--steps", "8")
    assert done.code == 0, done.err
    assert done.out.startswith("so far: 4 of 4 steps, learning rate 1.00e-03 at step 1, ")
    assert "  titan train r --resume training.steps=8\n" in done.out
    assert (finished / "r/recipe.lock.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "4"], "training.steps=4 is no more than the 4 steps that the run has done"),
        (["--epochs", "2"], "the length of this run is given in steps"),
        ([], "the length of this run is given in steps"),
    ],
)
def test_extend_refuses(titan: Train, finished: Path, arguments: list[str], words: str) -> None:
    done = titan("recipe", "extend", "r", *arguments)
    assert done.code == 2 and words in done.err


def test_a_finished_run_proposes_to_look_first(titan: Train, finished: Path) -> None:
    done = titan("train", "r", "--resume")
    line = next(line for line in done.err.splitlines() if line.startswith("to continue: "))
    words = shlex.split(line.removeprefix("to continue: "), comments=True)
    assert words == ["titan", "recipe", "extend", "r", "--steps", "8"]
    assert titan(*words[1:]).code == 0


def test_a_schedule_that_begins_later() -> None:
    """Equal to a schedule of its own, shifted; before it, its first factor."""
    late = build(WarmupStableDecay(warmup_steps=3, decay_ratio=0.5, start_step=10), steps=30)
    own = build(WarmupStableDecay(warmup_steps=3, decay_ratio=0.5), steps=20)
    assert [late(step) for step in range(10, 40)] == [own(step) for step in range(30)]
    assert late(0) == late(9) == own(0)


def test_a_schedule_must_begin_before_its_end(titan: Train, here: Path) -> None:
    done = titan("validate", "tiny.toml", "lr_scheduler.start_step=6")
    assert done.code == 3 and "the schedule ends after step 6, before it begins" in done.err
