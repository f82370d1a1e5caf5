"""`titan train` as users run it: signals, several ranks, failures of one of them."""

from __future__ import annotations

import json
import os
import pty
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import titancli
from tests.run.conftest import Command, Finished, losses, workers_of
from titancli.errors import EnvironmentProblem
from titancli.launchers import local, torchrun
from titancli.runs import RunFolder

pytestmark = pytest.mark.e2e

SLOW = ("-p", "./faulty.py", "loss=faulty", "loss.sleep=0.1", "training.steps=200")


@pytest.mark.parametrize(
    ("number", "code", "why"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 75, "stopped"),
        (signal.SIGUSR1, 75, "stopped"),
    ],
)
def test_a_signal_saves_and_leaves_with_its_own_code(
    command: Callable[..., Command], here: Path, number: signal.Signals, code: int, why: str
) -> None:
    running = command("tiny.toml", *SLOW, "--run-dir", "r")
    running.until_step(here / "r/events.jsonl", 1)
    running.process.send_signal(number)
    done = running.wait()
    assert done.code == code, done.err
    assert f"{number.name}: stopping after this step" in done.err
    outcome = RunFolder(here / "r").outcome()
    assert outcome is not None
    assert (outcome["why"], outcome["signal"]) == (why, number.name)
    assert (here / "r" / outcome["checkpoint"] / "manifest.json").is_file()
    assert "titan train r --resume" in done.err


@pytest.mark.parametrize("several", [(), ("--nproc", "2")], ids=["one", "two"])
def test_a_run_whose_terminal_is_gone_saves_and_leaves_with_75(here: Path, several: tuple[str, ...]) -> None:
    """Every write to the terminal fails from then on; the kernel's SIGHUP is sent by hand."""
    master, slave = pty.openpty()
    arguments = ("tiny.toml", *SLOW, "--run-dir", "r", *several)
    script = here / "as_in_a_terminal.py"  # where these tests run under nohup, SIGHUP would stay ignored
    script.write_text(
        "import signal, sys\nfrom titancli.cli import main\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\nsys.exit(main())\n"
    )
    run = subprocess.Popen(
        [sys.executable, script, "train", *arguments], cwd=here, stdout=slave, stderr=slave
    )
    os.close(slave)
    seen = b""
    while b"step 1/" not in seen:
        seen += os.read(master, 4096)
    os.close(master)
    run.send_signal(signal.SIGHUP)
    assert run.wait(60) == 75
    outcome = RunFolder(here / "r").outcome()
    assert outcome is not None
    assert (outcome["why"], outcome["signal"]) == ("stopped", "SIGHUP")
    assert (here / "r" / outcome["checkpoint"] / "manifest.json").is_file()
    assert workers_of(here / "r") == []


@pytest.mark.parametrize("several", [(), ("--nproc", "2", "launcher.max_restarts=3")], ids=["one", "two"])
def test_a_second_ctrl_c_leaves_at_once(
    command: Callable[..., Command], here: Path, several: tuple[str, ...]
) -> None:
    hangs = ("loss.fault=hang", "loss.call=2", "loss.rank=0")  # for an hour, in the second step
    running = command("tiny.toml", *SLOW, *hangs, "--run-dir", "r", *several)
    while not (here / "hanging").exists():  # before that, it would stop after the first step
        assert running.process.poll() is None, running.wait()
        time.sleep(0.02)
    running.process.send_signal(signal.SIGINT)
    running.until_said("SIGINT: stopping after this step")
    running.process.send_signal(signal.SIGINT)
    done = running.wait()
    assert done.code == 130
    assert not list((here / "r/checkpoints").iterdir())
    assert "interrupted again: exiting now" in done.err
    assert "all ranks were restarted" not in done.err
    assert workers_of(here / "r") == []


WHOLE = ("loss=faulty", "lr_scheduler.total_steps=200", "training.steps=20")
NEVER = "checkpoint.interval=1000"  # what is there in the end was saved on the way out


def resumed_equals_whole(train_on: Callable[..., Finished], reference: Any, run: Path, signal: str) -> None:
    """That two ranks stopped by a signal have saved, and go on bit for bit."""
    outcome = RunFolder(run).outcome()
    assert outcome is not None
    assert (outcome["why"], outcome["signal"]) == ("stopped", signal)
    assert outcome["checkpoint"] == f"checkpoints/step-{outcome['step']}"
    steps = outcome["step"] + 2
    more = ("loss.sleep=0.0", "loss.fault=none", f"training.steps={steps}", *WHOLE[1:2])
    resumed = train_on(2, run.name, "--resume", *more)
    assert resumed.code == 0, resumed.err
    assert f"from step-{outcome['step']}" in resumed.err
    expected, _ = reference(2, *WHOLE)
    assert losses(run) == {step: expected[step] for step in range(1, steps + 1)}


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_two_ranks_stopped_by_a_signal_resume_as_if_they_had_not(
    command: Callable[..., Command],
    train_on: Callable[..., Finished],
    reference: Any,
    here: Path,
    number: signal.Signals,
) -> None:
    running = command("tiny.toml", *SLOW, NEVER, "--nproc", "2", "--run-dir", "r")
    running.until_step(here / "r/events.jsonl", random.randint(1, 4))
    running.process.send_signal(number)
    done = running.wait()
    assert done.code == 75, done.err
    assert workers_of(here / "r") == []
    resumed_equals_whole(train_on, reference, here / "r", number.name)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.slow), "SIGUSR1"])
def test_a_signal_to_one_rank_stops_both_and_they_resume_as_if_they_had_not(
    train_on: Callable[..., Finished], reference: Any, here: Path, name: str
) -> None:
    fault = ("loss=faulty", "loss.fault=signal", f"loss.signal={name}", "loss.rank=1")
    call = f"loss.call={random.randint(1, 5)}"
    done = train_on(2, "tiny.toml", *fault, call, NEVER, *WHOLE[1:], "--run-dir", "r")
    assert done.code == 75, done.err
    resumed_equals_whole(train_on, reference, here / "r", name)


@pytest.mark.cold
def test_no_module_of_the_working_directory_is_run_in_place_of_a_library(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('json.py was run')")
    line = [sys.executable, "-m", "titancli", "--version"]
    unsafe = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert "json.py was run" in unsafe.stderr  # that is what Python does
    done = subprocess.run(
        line, cwd=tmp_path, env=torchrun._environment(2), capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("titan ")


def test_ranks_that_cannot_be_started_show_what_torchrun_said(
    train: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "print(*range(100), sep='\\n'); print('NumberGone: no such thing'); raise SystemExit(1)"
    monkeypatch.setattr(local, "torchrun_command", lambda *_, **__: [sys.executable, "-c", script])
    done = train("tiny.toml", "--nproc", "2", "--run-dir", "r")
    assert done.code == 1
    assert "error: the ranks could not be started\n  86\n" in done.err
    assert "  99\n  NumberGone: no such thing\nlog: " in done.err


def test_a_rank_that_fails_is_one_block(command: Callable[..., Command], here: Path) -> None:
    fault = ("-p", "./faulty.py", "loss=faulty", "loss.fault=error", "loss.rank=1")
    done = command("tiny.toml", *fault, "--nproc", "2", "--run-dir", "r").wait()
    assert done.code == 1
    host = os.uname().nodename
    assert f"error: rank 1 of 2 on {host} failed at step 3: ValueError: a row of 13 tokens" in done.err
    assert done.err.count("Traceback") == 1
    assert f"log: {here}/r/logs/rank-1.log" in done.err
    assert "elastic" not in done.err
    assert "a row of 13 tokens" in (here / "r/logs/rank-1.log").read_text()
    assert workers_of(here / "r") == []


def test_a_rank_that_is_killed_is_named_and_a_restart_goes_on_from_the_checkpoint(
    command: Callable[..., Command], here: Path
) -> None:
    # The third call of each start kills rank 1: at step 3, and from the checkpoint of step 2 on at step 5.
    fault = ("-p", "./faulty.py", "loss=faulty", "loss.fault=kill", "loss.rank=1")
    done = command("tiny.toml", *fault, "launcher.max_restarts=1", "--nproc", "2", "--run-dir", "r").wait(150)
    assert done.code == 1
    assert "all ranks were restarted (restart 1)" in done.err
    assert "from step-2" in done.err
    assert "rank 1 of 2 on " in done.err
    assert "failed at step 5: killed by SIGKILL" in done.err
    assert "Traceback" not in done.err
    assert set(losses(here / "r")) == {1, 2, 3, 4}


HANGS = [("mesh.tp=2", 3), pytest.param("mesh.pp=2", 5, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("layout", "call"), HANGS)
def test_a_rank_that_hangs_is_told_in_one_block_with_its_stack_and_the_others_collectives(
    command: Callable[..., Command], here: Path, layout: str, call: int
) -> None:
    fault = ("-p", "./faulty.py", "loss=faulty", "loss.fault=hang", "loss.rank=1", f"loss.call={call}")
    fault = (*fault, "loss.hang=6")  # or torchrun gives it 30 s after its SIGTERM
    limits = (layout, "mesh.dp_shard=1", "comm.train_timeout_seconds=3", "--nproc", "2")
    done = command("tiny.toml", *fault, *limits, "--run-dir", "r").wait(150)
    assert done.code == 1
    assert "error: rank 0 of 2 on " in done.err and "failed at step 3: RuntimeError" in done.err
    assert "3000ms" in done.err
    assert f"rank 1 may hang or be unreachable; see {here}/r/logs/rank-1.log" in done.err
    assert done.err.count("Traceback") == 1
    trace = json.loads((here / "r/logs/flight-recorder-rank-0.json").read_text())
    assert "gloo:" in trace["entries"][-1]["profiling_name"]
    assert 'faulty.py", line' in (here / "r/logs/rank-1.log").read_text()  # where it hangs
    assert workers_of(here / "r") == []


def test_a_launcher_that_is_killed_leaves_no_rank_behind(command: Callable[..., Command], here: Path) -> None:
    """And nobody takes the folder as long as they are there: two would write the same files."""
    running = command("tiny.toml", *SLOW, "loss.sleep=1.0", "--nproc", "2", "--run-dir", "r")
    running.until_step(here / "r/events.jsonl", 1)
    running.process.kill()
    running.wait()
    with pytest.raises(EnvironmentProblem, match="in use by process"):
        RunFolder(here / "r").hold()
    assert workers_of(here / "r", seconds=30) == []
    assert list((here / "r/checkpoints").glob("step-*"))
    RunFolder(here / "r").hold().release()


def test_nodes_with_different_recipes_are_refused_and_leave_no_run(
    command: Callable[..., Command], here: Path
) -> None:
    (here / "b").mkdir()
    for name in ("tiny.toml", "text.txt"):
        (here / "b" / name).write_bytes((here / name).read_bytes())
    meet = ("--nnodes", "2", "--nproc", "1", "--rdzv", "localhost:29617", "--run-dir", str(here / "r"))
    data = f'dataset.paths=["{here}/text.txt"]'
    first = command("tiny.toml", *meet, data)
    second = Command(here / "b", "tiny.toml", *meet, data, "training.seed=1")
    for done in (first.wait(), second.wait()):
        assert done.code == 5, done.err
        assert "started with different resolved recipes" in done.err
    assert not RunFolder.is_run(here / "r")


@pytest.mark.cold  # a fork has imported titan already
@pytest.mark.slow
def test_nodes_with_different_code_are_refused(command: Callable[..., Command], here: Path) -> None:
    (here / "b").mkdir()
    package = Path(titancli.__file__).parent
    shutil.copytree(package, here / "other/titancli")
    if (package.parent / "recipes").is_dir():  # beside an editable installation
        (here / "other/recipes").symlink_to(package.parent / "recipes")
    (here / "other/titancli/losses/__init__.py").open("a").write("# changed on one node\n")
    meet = ("tiny.toml", "--nnodes", "2", "--nproc", "1", "--rdzv", "localhost:29618", "--run-dir")
    (here / "b/tiny.toml").write_bytes((here / "tiny.toml").read_bytes())
    data = f'dataset.paths=["{here}/text.txt"]'
    first = command(*meet, str(here / "r"), data)
    second = Command(
        here / "b", *meet, str(here / "r"), data, env={**os.environ, "PYTHONPATH": str(here / "other")}
    )
    for done in (first.wait(), second.wait()):
        assert done.code == 5, done.err
        assert "started with different code of titan or its plugins" in done.err
    assert not RunFolder.is_run(here / "r")


def test_a_full_disk_is_said_in_words_and_costs_no_checkpoint(
    train: Callable[..., Finished], command: Callable[..., Command], here: Path
) -> None:
    assert train("tiny.toml", "training.steps=2", "--run-dir", "r").code == 0
    running = command("r", "--resume", "training.steps=4")
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (60_000, 60_000))
    done = running.wait()
    assert done.code != 0
    assert "Traceback" not in done.err
    assert "step-4" in done.err
    assert (here / "r/checkpoints/step-2/manifest.json").is_file()
    assert not (here / "r/checkpoints/step-4").exists()
    assert train("r", "--resume", "training.steps=4").code == 0
