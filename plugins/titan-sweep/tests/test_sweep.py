"""`titan sweep`: every combination of some values, each a run of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Done
from tests.run.conftest import furnish
from titan_sweep import jobs as jobs_module
from titan_sweep.command import _command, _exit_code
from titan_sweep.jobs import Jobs, shares
from titan_sweep.sweep import Job, combinations, hold, name_of, parse_set
from titancli import registry
from titancli.cli import main
from titancli.cli.common import Common
from titancli.errors import EnvironmentProblem, UsageError
from titancli.runs import RunFolder

Sweep = Callable[..., Done]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with the recipe `tiny.toml`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TITAN_RUNS", raising=False)
    return furnish(tmp_path)


@pytest.fixture
def sweep(here: Path, capfd: pytest.CaptureFixture[str]) -> Sweep:
    """`titan sweep tiny.toml … --dir s`, in this process; its runs are processes of their own."""

    def run(*arguments: str) -> Done:
        try:
            return Done(main(["sweep", "tiny.toml", "--dir", "s", *arguments]), *capfd.readouterr())
        finally:
            registry.configure()

    return run


LR = ("--set", "optimizer.lr=1e-3,3e-3")


# -------------------------------------------------------------------------------------------- the values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,3e-3", [0.001, 0.003]),
        ("1, 2,", [1, 2]),
        ("adamw,muon", ["adamw", "muon"]),
        ("true", [True]),
        ('"a,b",\'c"\'', ["a,b", 'c"']),
        (r'"a\",b",c', ['a",b', "c"]),
        ("[0.9, 0.95],[]", [[0.9, 0.95], []]),
        ('{type = "x", b = [1, "]"]},2', [{"type": "x", "b": [1, "]"]}, 2]),
    ],
)
def test_commas_in_quotes_and_brackets_part_nothing(text: str, values: list[Any]) -> None:
    found = parse_set(f"a.b={text}")
    assert [one.value for one in found] == values and {one.key for one in found} == {"a.b"}


@pytest.mark.parametrize(
    ("sets", "overrides", "words"),
    [
        (["optimizer.lr"], [], "there is no KEY="),
        (["=1"], [], "there is no KEY="),
        (["a="], [], "a value is missing"),
        (["a=1,,2"], [], "a value is missing"),
        (["a=[1,2"], [], "brackets do not match"),
        (["a=1],[2"], [], "brackets do not match"),
        (["a=it's,that"], [], "a quote has no end"),
        (["a=1", "a=2"], [], "a is given twice"),
        (["a=1"], ["a=2"], "a is given twice"),
        (["a=1e-3,0.001"], [], "the value 0.001 is given twice"),
    ],
)
def test_what_cannot_be_read_is_refused(sets: list[str], overrides: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("[", r"\[")):
        combinations(sets, overrides)


def test_runs_are_named_by_their_values_and_no_two_alike() -> None:
    found = [name_of(one) for one in combinations(["optimizer.lr=1e-3,3e-3", "training.seed=1,2"], [])]
    assert found == ["lr=0.001,seed=1", "lr=0.001,seed=2", "lr=0.003,seed=1", "lr=0.003,seed=2"]
    (one,) = combinations(["optimizer.type=adamw", "loss.type=dpo"], [])
    assert name_of(one) == "optimizer.type=adamw,loss.type=dpo"
    odd = [name_of(one) for one in combinations([f"a='x y','x/y','../x',\"{'l' * 99}\",\"{'l' * 98}\""], [])]
    assert len(set(odd)) == 5 and not any("/" in name or " " in name for name in odd)
    assert max(map(len, odd)) < 80


# ------------------------------------------------------------------------------------------------ whole


def no_page(*_: object) -> None:
    raise EnvironmentProblem("not installed")


def test_a_sweep_trains_every_combination_and_the_second_time_nothing(
    sweep: Sweep, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*LR, "--jobs", "2", "training.steps=2")
    done = sweep(*arguments, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["schema"] == "titan.sweep" and document["folder"] == str(here / "s")
    low, high = document["runs"]
    assert (low["name"], low["values"], low["action"]) == ("lr=0.001", {"optimizer.lr": 0.001}, "start")
    assert [run["state"] for run in (low, high)] == ["finished"] * 2
    assert low["step"] == 2 and low["loss"] != high["loss"] and low["best_val_loss"] is None
    assert (here / "s/lr=0.003/logs/rank-0.log").is_file()
    assert "lr = 0.003" in (here / "s/lr=0.003/recipe.lock.toml").read_text()
    assert "finished at step 2" in (here / "s/logs/lr=0.001.log").read_text()
    assert "report:   s/report.html" in done.err and "lr=0.003" in (here / "s/report.html").read_text()

    monkeypatch.setattr(jobs_module.Jobs, "_start", lambda self, job: pytest.fail(f"{job.name} is started"))
    monkeypatch.setattr("titan_report.page.html", no_page)
    again = sweep(*arguments)
    assert again.code == 0 and "there is no report: not installed" in again.err
    rows = [line.split() for line in again.out.splitlines()]
    assert rows[0] == ["run", "state", "step", "loss", "tokens/s"]
    assert rows[2][:3] == ["lr=0.003", "finished", "2/2"]
    assert f"compare:  titan runs compare {'s/lr=0.001 s/lr=0.003'}" in again.err

    extended = RunFolder(here / "s/lr=0.001")  # by hand, later
    extended.write_recipe_lock(extended.recipe_lock.read_text().replace("steps = 2", "steps = 9", 1))
    assert sweep(*arguments, "--dry-run").code == 0

    other = sweep(*arguments[:-1], "training.steps=3")
    assert other.code == 5 and "is a sweep of another recipe, also named tiny" in other.err
    assert "training.steps: 2 -> 3" in other.err
    renamed = sweep(*arguments, "name=other")
    assert renamed.code == 5 and "is a sweep of tiny, not of other" in renamed.err
    more = sweep("--set", "optimizer.beta2=0.9,0.95", "training.steps=2", "--dry-run")
    assert more.code == 0 and [row.split()[1] for row in more.out.splitlines()[1:]] == ["start"] * 2
    wider = sweep("--set", "optimizer.lr=1e-3,1e-2", "training.steps=2", "--dry-run")
    assert [row.split()[:2] for row in wider.out.splitlines()[1:]] == [
        ["lr=0.001", "skip"],
        ["lr=0.01", "start"],
    ]


def test_every_combination_is_checked_before_anything_is_written(sweep: Sweep, here: Path) -> None:
    done = sweep("--set", "optimizer.lr=1e-3,-1,-2", "--set", "training.steps=2,two")
    assert done.code == 3 and not (here / "s").exists()
    for words in ("optimizer.lr=-1", "optimizer.lr=-2", "training.steps=two"):
        assert done.err.count(f" {words}\n") == 1
    done = sweep("--set", "mesh.tp=1,3")
    assert done.code != 0 and not (here / "s").exists()
    done = sweep("--set", "dataset.paths=['text.txt'],['none.txt']")
    assert done.code == 5 and "none.txt" in done.err and not (here / "s").exists()
    done = sweep("--set", "optimizer.lr=1e-3,1.0e-3")
    assert done.code == 2


def test_a_dry_run_writes_nothing(sweep: Sweep, here: Path) -> None:
    done = sweep(*LR, "--dry-run")
    assert done.code == 0 and not (here / "s").exists()
    assert [line.split()[:4] for line in done.out.splitlines()[1:]] == [
        ["lr=0.001", "start", "not", "started"],
        ["lr=0.003", "start", "not", "started"],
    ]


@pytest.mark.parametrize("content", ["run", "notes", "file"])
def test_a_folder_of_something_else_is_refused(sweep: Sweep, here: Path, content: str) -> None:
    if content == "file":
        (here / "s").write_text("")
    else:
        (here / "s").mkdir()
        (here / "s" / ("recipe.lock.toml" if content == "run" else "notes.txt")).write_text("")
    done = sweep(*LR)
    assert done.code == 5 and "use" in done.err and "--dir" in done.err


def test_two_at_once_in_one_folder_are_refused(sweep: Sweep, here: Path) -> None:
    held = hold(here / "s")
    done = sweep(*LR)
    assert done.code == 5 and f"the sweep {here / 's'} is in use by process {os.getpid()}" in done.err
    held.release()


def test_a_run_that_fails_is_tried_once_more_and_the_others_go_on(
    sweep: Sweep, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(*arguments: str) -> list[str]:
        code = "import sys; print('error: no luck', file=sys.stderr); sys.exit(5)"
        return [sys.executable, "-c", code if "lr=0.001" in arguments[1] else "", *arguments]

    monkeypatch.setattr(jobs_module, "titan", command)
    done = sweep(*LR, "--json")
    assert done.code == 1
    first, second = json.loads(done.out)["runs"]
    assert (first["state"], first["error"]) == ("failed", "error: no luck")
    assert (second["state"], second["error"]) == ("not_started", None)
    assert (here / "s/logs/lr=0.001.log").read_text().count("no luck") == 2
    assert done.err.count("lr=0.001: started") == 2 and done.err.count("lr=0.003: started") == 1
    assert "lr=0.001: failed: error: no luck\n log: s/logs/lr=0.001.log" in done.err


# ------------------------------------------------------------------------------------------------- jobs


def job(folder: Path, name: str, action: str = "start") -> Job:
    (folder / "logs").mkdir(exist_ok=True)
    return Job(name, (), RunFolder(folder / name), folder / f"{name}.toml", "", action)


class Fake:
    """Commands that are Python scripts, by the names of jobs; and what was reported about them."""

    def __init__(self, **scripts: str) -> None:
        self.scripts = scripts
        self.reported: list[tuple[str, int | None]] = []
        self.on_start: Callable[[], None] = lambda: None

    def command(self, job: Job) -> Sequence[str]:
        return [sys.executable, "-S", "-c", self.scripts[job.name]]

    def report(self, job: Job, code: int | None) -> None:
        self.reported.append((job.name, code))
        if code is None:
            self.on_start()


WAITS = """
import os, signal, sys
print("group", os.getpgid(0) == os.getpid(), flush=True)
signal.signal(signal.SIGTERM, lambda *a: sys.exit(75))
signal.signal(signal.SIGINT, lambda *a: sys.exit(130))
open("ready", "a").close()
signal.pause()
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs_module, "POLL_SECONDS", 0.01)
    return tmp_path


def test_a_job_blocks_the_plugins_that_the_sweep_does(in_folder: Path) -> None:
    command = _command(job(in_folder, "a", "resume"), None, Common(blocked=("titan-muon",)))
    assert command[command.index("-p") + 1] == "no:titan-muon"


def test_a_finished_job_is_not_started_and_one_that_had_failed_is_started_once(in_folder: Path) -> None:
    fake = Fake(a="", b="raise SystemExit(1)", c="raise SystemExit(1)")
    runner = Jobs(fake.command, [{}], report=fake.report)
    runner.run([job(in_folder, "a", "skip"), job(in_folder, "b", "retry"), job(in_folder, "c", "resume")])
    assert fake.reported == [("b", None), ("b", 1), ("c", None), ("c", 1), ("c", None), ("c", 1)]
    assert runner.codes == {"b": 1, "c": 1}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_all_in_good_order_and_starts_no_more(
    in_folder: Path, number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake(a=WAITS, b="")
    before = signal.getsignal(number)

    def interrupt() -> None:
        while not (in_folder / "ready").exists():
            pass
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    fake.on_start = thread.start
    runner = Jobs(fake.command, [{}], report=fake.report)
    runner.run([job(in_folder, "a"), job(in_folder, "b")])
    thread.join()
    assert fake.reported == [("a", None), ("a", code)] and runner.received == [number]
    assert signal.getsignal(number) is before
    assert (in_folder / "logs/a.log").read_text() == "group True\n"
    assert capsys.readouterr().err.count(f"{number.name}: stopping all runs") == 1
    states = [{"state": "interrupted"}, {"state": "not_started"}]
    assert _exit_code(states, runner.received) == code


def test_what_raises_in_the_middle_leaves_no_job_behind(in_folder: Path) -> None:
    fake = Fake(a=WAITS)

    def full() -> None:
        while not (in_folder / "ready").exists():
            pass
        raise OSError("disk full")

    fake.on_start = full
    runner = Jobs(fake.command, [{}], report=fake.report)
    with pytest.raises(OSError, match="disk full"):
        runner.run([job(in_folder, "a")])
    assert [process.returncode for process in runner._running] == [75]


def test_the_exit_code_says_the_worst() -> None:
    def code(*states: str, received: Sequence[int] = ()) -> int:
        return _exit_code([{"state": state} for state in states], received)

    assert code("finished", "data_ended") == 0 == code("finished", received=[signal.SIGINT])
    assert code("finished", "stopped") == 75
    assert code("failed", "stopped") == 1 == code("finished", "died")


def test_gpus_are_divided_among_jobs_and_else_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(jobs_module, "visible_gpu_names", list)
    assert shares(1, None) == [{}]
    assert shares(2, 2) == [{"OMP_NUM_THREADS": "2"}] * 2
    monkeypatch.setattr(jobs_module, "visible_gpu_names", lambda: ["4", "5", "6", "GPU-1"])
    assert shares(2, None) == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,GPU-1"}]
    with pytest.raises(EnvironmentProblem, match="4 visible GPUs cannot be divided by --jobs 3") as caught:
        shares(3, None)
    assert caught.value.hint == "use --jobs 1 or 2 or 4"
