"""`titan runs list|show|rm`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Titan
from tests.cli.run_folders import LOCK, attempt, began, ended, event, make, step
from tests.yardstick import cpu_seconds
from titancli.errors import EnvironmentProblem
from titancli.observe import summary
from titancli.observe.events import BLOCK, backwards, can_be_shown, read_events
from titancli.observe.summary import summarize
from titancli.runs import RunFolder


@pytest.fixture(autouse=True)
def no_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TITAN_RUNS", raising=False)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished run, one that failed, and one that was killed."""
    folder = tmp_path / "runs"
    make(folder / "a", [began(), step(100, 9, 1.5), event("run_end", 10, why="finished", step=100)])
    failed = [attempt(ended("failed", 3, error="ValueError: bad"))]
    make(folder / "b", [began(), step(3, 4, "NaN")], failed, created=60)
    make(folder / "c", [began(), step(7, 9, 2.5)], [attempt()], created=120)
    return folder


def rows(out: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in out.splitlines()}


def held(path: Path, how: str) -> subprocess.Popen[bytes]:
    """Another process that holds a run folder as a command (`hold`) or a rank (`join`) does."""
    code = (
        "import sys; from pathlib import Path; from titancli.runs import RunFolder\n"
        f"hold = RunFolder(Path(sys.argv[1])).{how}(); print('held', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(path)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


@pytest.fixture(params=["hold", "join"])
def live(request: pytest.FixtureRequest, runs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What holds run `c`: its command, or ranks that outlived theirs."""
    process = held(runs / "c", request.param)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# ------------------------------------------------------------------------------------------------ list


def test_runs_are_listed_oldest_first_with_what_was_logged_last(titan: Titan, runs: Path) -> None:
    done = titan("runs", "list")
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()] == ["run", "runs/a", "runs/b", "runs/c"]
    found = rows(done.out)
    assert found["runs/a"][:4] == ["finished", "100/100", "1.5000", "10"]
    assert found["runs/b"][:3] == ["failed", "3/100", "nan"]
    assert found["runs/c"][:3] == ["died", "7/100", "2.5000"]
    assert found["runs/c"][-2:] == ["tiny", "-"]


def test_as_json_what_is_not_finite_is_text(titan: Titan, runs: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    document = json.loads(titan("runs", "list", "runs", "--json").out, parse_constant=refuse)
    assert document["schema"] == "titan.runs"
    assert [run["metrics"]["loss"] for run in document["runs"]] == [1.5, "NaN", 2.5]
    assert document["runs"][1]["error"] == "ValueError: bad"


def test_a_run_whose_folder_is_held_is_running_until_its_process_is_killed(
    titan: Titan, runs: Path, live: subprocess.Popen[bytes]
) -> None:
    before = {path: path.read_bytes() for path in (runs / "c").glob("*.lock")}
    assert rows(titan("runs", "list").out)["runs/c"][0] == "running"
    assert {path: path.read_bytes() for path in (runs / "c").glob("*.lock")} == before
    live.send_signal(signal.SIGKILL)
    live.wait()
    assert rows(titan("runs", "list").out)["runs/c"][0] == "died"


def test_asking_whether_a_run_is_in_use_keeps_nobody_from_taking_it(runs: Path) -> None:
    """The lock is held for the moment of the question."""
    code = (
        "import sys, time; from pathlib import Path; from titancli.runs import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1])); print('asking', flush=True)\n"
        "while True: folder.in_use()"
    )
    asking = subprocess.Popen([sys.executable, "-c", code, str(runs / "c")], stdout=subprocess.PIPE)
    assert asking.stdout is not None and asking.stdout.readline() == b"asking\n"
    try:
        for _ in range(200):
            RunFolder(runs / "c").hold().release()
    finally:
        asking.kill()
        asking.communicate()


def test_a_run_of_another_machine_may_still_be_running(titan: Titan, tmp_path: Path) -> None:
    make(tmp_path / "runs" / "far", [began()], [attempt(host="elsewhere")])
    (run,) = json.loads(titan("runs", "list", "--json").out)["runs"]
    assert (run["state"], run["host"]) == ("unknown", "elsewhere")
    assert "cannot be seen whether it still runs on elsewhere" in run["problems"][0]
    done = titan("runs", "rm", "runs/far", "--yes")
    assert done.code == 5 and "may still be running" in done.err and (tmp_path / "runs" / "far").exists()


def test_a_folder_without_runs_is_said_to_be_one(titan: Titan, tmp_path: Path) -> None:
    assert titan("runs", "list") == (0, "", "there are no runs in runs\n")
    assert json.loads(titan("runs", "list", "--json").out)["runs"] == []
    done = titan("runs", "list", "nowhere")
    assert done.code == 5 and "nowhere cannot be read: No such file" in done.err


def test_a_run_is_no_folder_of_runs(titan: Titan, runs: Path) -> None:
    done = titan("runs", "list", "runs/a")
    assert done.code == 2 and "titan runs show runs/a" in done.err


def test_a_link_is_listed_once_and_what_is_no_run_not_at_all(
    titan: Titan, runs: Path, tmp_path: Path
) -> None:
    (runs / "latest").symlink_to("c")
    (runs / "far").symlink_to(make(tmp_path / "disk" / "d", created=240), target_is_directory=True)
    (runs / "lost").symlink_to("nothing")
    (runs / "notes").mkdir()
    (runs / "notes.txt").write_text("mine")
    assert list(rows(titan("runs", "list").out)) == ["run", "runs/a", "runs/b", "runs/c", "runs/far"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"format": 1, "attem', "cannot read"),
        ("[]", "format None"),
        ('{"format": 7, "attempts": []}', "format 7"),
        ('{"format": 1, "attempts": {}}', "no list of attempts"),
        ('{"format": 1, "attempts": [{"outcome": "good"}]}', "an invalid outcome"),
        (
            '{"format": 1, "attempts": [{"outcome": {"metrics": {"loss": "high"}}}]}',
            "an invalid outcome",
        ),
        ('{"format": 1, "created": 3}', "an invalid created"),
        (None, "there is no run.json"),
    ],
)
def test_a_damaged_record_hinders_no_other_run(
    titan: Titan, runs: Path, text: str | None, problem: str
) -> None:
    record = runs / "b" / "run.json"
    record.unlink() if text is None else record.write_text(text)
    found = {Path(run["path"]).name: run for run in json.loads(titan("runs", "list", "--json").out)["runs"]}
    assert (found["a"]["state"], found["c"]["state"]) == ("finished", "died")
    assert (found["b"]["state"], found["b"]["step"]) == ("unknown", 3)
    assert problem in found["b"]["problems"][0]
    done = titan("runs", "show", "runs/b")
    assert done.code == 0 and problem in done.out


def test_the_event_log_says_how_a_run_without_a_record_ended(runs: Path) -> None:
    (runs / "a" / "run.json").unlink()
    assert summarize(runs / "a").state == "finished"


def test_lines_that_cannot_be_shown_are_passed_over(tmp_path: Path) -> None:
    good = json.dumps(step(5, 5, 1.25)).encode()
    bad = [
        b'{"version": 1, "event": "step", "time"',
        b"\x00\x00\xff",
        b"[1]",
        json.dumps(step(9, 9) | {"version": 2}).encode(),
        json.dumps(step(9, 9, "high")).encode(),
        json.dumps(event("step", 9, step="9", steps=100, metrics={})).encode(),
        b'{"version": 1, "event": "step", "ti',  # being written
    ]
    run = summarize(make(tmp_path / "r", b"\n".join([good, *bad]), [attempt()]))
    assert (run.step, run.metrics["loss"], run.problems) == (5, 1.25, [])


def test_a_resume_from_an_earlier_checkpoint_goes_back(tmp_path: Path) -> None:
    events = [began(), step(10, 1, 3.0), step(20, 2, 2.0), began(5, step=10, attempt=2)]
    run = summarize(make(tmp_path / "r", events, [attempt(ended("failed")), attempt()]))
    assert (run.step, run.metrics["loss"]) == (10, 3.0)
    run = summarize(make(tmp_path / "s", [*events, step(11, 6, 2.9)], [attempt(ended("failed")), attempt()]))
    assert (run.step, run.metrics["loss"], len(run.attempts)) == (11, 2.9, 2)


def test_a_run_that_logged_nothing_has_no_metrics(titan: Titan, tmp_path: Path) -> None:
    make(tmp_path / "runs" / "r", b"", [attempt(ended("failed", None, error="no data"))])
    assert rows(titan("runs", "list").out)["runs/r"][:4] == ["failed", "-", "—", "—"]
    (tmp_path / "runs" / "r" / "events.jsonl").unlink()
    assert titan("runs", "show", "runs/r").code == 0


@pytest.mark.parametrize("size", [1, 100, BLOCK])
def test_a_log_is_read_backwards_as_it_is_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("titancli.observe.events.BLOCK", size)
    events = [
        began(),
        *(step(n, n, loss=n / 7) for n in range(40)),
        event("log", 41, level="info", message="é"),
    ]
    run = make(tmp_path / "r", events)
    assert list(backwards(run / "events.jsonl")) == read_events(run / "events.jsonl")[::-1] == events[::-1]


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "r", [began(), *(step(n, 1) for n in range(3000))], [attempt()])
    parsed: list[bytes] = []
    whole = summary.backwards

    def counted(path: Path) -> Iterator[dict[str, Any]]:
        for found in whole(path):
            parsed.append(b"")
            yield found

    monkeypatch.setattr(summary, "backwards", counted)
    assert summarize(run).step == 2999
    assert len(parsed) == 1


def test_listing_reads_no_whole_log(titan: Titan, tmp_path: Path) -> None:
    """200 runs are listed in less time than it takes to parse their logs."""
    log = "".join(f"{json.dumps(step(n, 1))}\n" for n in range(1000)).encode()
    for number in range(200):
        make(tmp_path / "runs" / f"r{number}", log, [attempt(ended("failed")) if number % 2 else attempt()])
    lines = log.splitlines()
    parsing = 200 * cpu_seconds(lambda: [json.loads(line) for line in lines], times=3)
    listed: list[str] = []
    assert cpu_seconds(lambda: listed.extend(titan("runs", "list").out.splitlines())) < parsing
    assert len(listed) == 201


# ------------------------------------------------------------------------------------------------ show


def test_show_tells_attempts_and_environment(titan: Titan, tmp_path: Path) -> None:
    first = attempt(ended("stopped", 10), ended="2026-01-31T12:00:10.5Z")
    second = attempt(checkpoint="/x/checkpoints/step-10", git={"commit": "abc", "branch": "m", "dirty": True})
    run = make(
        tmp_path / "r", [began(), step(20, 20, 1.25, **{"validation/held_out/loss": 1.5})], [first, second]
    )
    (run / "checkpoints" / "step-10").mkdir()
    (run / "logs" / "rank-0.log").write_text("")
    lines = [" ".join(line.split()) for line in titan("runs", "show", "r").out.splitlines()]
    assert "state died at step 20/100" in lines
    assert "latest loss 1.2500, lr 1.00e-03, 10 tokens/s" in lines
    assert "saved step-10" in lines
    assert "versions python 3.11.7, torch 2.13.0" in lines
    assert "git abc, with changes" in lines
    assert "logs logs/rank-0.log" in lines
    assert lines[-2] == "1 2026-01-31T12:00:00Z 2026-01-31T12:00:10Z stopped 10 1 the beginning"
    assert lines[-1] == "2 2026-01-31T12:00:00Z - - - 1 step-10"
    found = json.loads(titan("runs", "show", "r", "--json").out)["run"]
    assert [one["why"] for one in found["attempts"]] == ["stopped", None]
    assert found["environment"]["versions"]["torch"] == "2.13.0"


def test_show_of_what_is_no_run_says_so(titan: Titan, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    done = titan("runs", "show", "notes")
    assert done.code == 5 and "notes is not a run folder" in done.err


# -------------------------------------------------------------------------------------------------- rm


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)


def test_rm_asks_and_tells_what_would_be_lost(
    titan: Titan, runs: Path, terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "b" / "checkpoints" / "step-3").mkdir()
    (runs / "b" / "checkpoints" / "step-3" / "x").write_bytes(b"0" * 5000)
    monkeypatch.setattr("click.confirm", lambda text, err: False)
    done = titan("runs", "rm", "runs/b")
    assert done.code == 0 and "runs/b: failed, step 3, 1 checkpoint, 6." in done.err
    assert done.err.endswith("nothing was removed\n") and (runs / "b").exists()
    monkeypatch.setattr("click.confirm", lambda text, err: True)
    assert titan("runs", "rm", "runs/b").err.endswith("removed runs/b\n")
    assert sorted(path.name for path in runs.iterdir()) == ["a", "c"]


def test_rm_where_nobody_can_answer_needs_yes(titan: Titan, runs: Path) -> None:
    done = titan("runs", "rm", "runs/b")
    assert done.code == 2 and "add --yes" in done.err and (runs / "b").exists()
    assert json.loads(titan("runs", "rm", "runs/b", "runs/b", "--yes", "--json").out)["removed"] == [
        str(runs / "b")
    ]
    assert titan("runs", "rm", "runs/b", "--yes").code == 5  # there is none any more


def test_rm_failed_keeps_what_finished_and_what_has_a_checkpoint(titan: Titan, runs: Path) -> None:
    make(runs / "d", [began()], [attempt()])
    (runs / "d" / "checkpoints" / "step-5").mkdir()
    (runs / "latest").symlink_to("b")
    make(runs.parent / "elsewhere", [began()], [attempt()])
    (runs / "e").symlink_to(runs.parent / "elsewhere")
    assert titan("runs", "rm", "--failed", "--yes").code == 0
    assert sorted(path.name for path in runs.iterdir()) == ["a", "d", "e", "latest"]
    assert titan("runs", "rm", "--failed", "--yes") == (0, "", "nothing was removed\n")


def test_rm_failed_removes_what_was_stopped_before_its_first_step(titan: Titan, runs: Path) -> None:
    for name, number in (("d", 0), ("e", 3)):
        make(runs / name, [began()], [attempt(ended("interrupted", number))])
    assert titan("runs", "rm", "--failed", "--yes").code == 0
    assert sorted(path.name for path in runs.iterdir()) == ["a", "e"]


def test_a_live_run_is_not_removed_and_nor_are_those_named_beside_it(
    titan: Titan, runs: Path, live: subprocess.Popen[bytes]
) -> None:
    done = titan("runs", "rm", "runs/b", "runs/c", "--yes")
    assert done.code == 5 and f"in use by process {live.pid}" in done.err
    assert titan("runs", "rm", "--failed", "--yes").code == 0
    assert sorted(path.name for path in runs.iterdir()) == ["a", "c"]


@pytest.mark.parametrize("arguments", [[], ["runs/b", "--failed"]])
def test_rm_takes_names_or_failed(titan: Titan, runs: Path, arguments: list[str]) -> None:
    assert titan("runs", "rm", *arguments, "--yes").code == 2
    assert (runs / "b").exists()


def test_what_links_lead_to_stays(titan: Titan, runs: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "precious").write_text("weights")
    (runs / "b" / "checkpoints").rmdir()
    (runs / "b" / "checkpoints").symlink_to(disk)
    (runs / "latest").symlink_to("b")
    done = titan("runs", "rm", "runs/latest", "--yes")
    assert done.code == 5 and "is a link" in done.err and str(runs / "b") in done.err
    assert f"what it leads to stays: {disk}" in titan("runs", "rm", "runs/b", "--yes").err
    assert (disk / "precious").exists() and not (runs / "b").exists()


def test_a_removal_that_fails_in_the_middle_can_be_repeated(
    titan: Titan, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path / "x"))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        done = titan("runs", "rm", "runs/b", "--yes")
    assert done.code == 5 and "x cannot be removed: Permission denied" in done.err
    assert (runs / "b" / "recipe.lock.toml").read_text() == LOCK
    assert titan("runs", "rm", "runs/b", "--yes").code == 0 and not (runs / "b").exists()


def test_another_users_run_is_named_and_passed_over(
    titan: Titan, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RunFolder.is_run

    def is_run(path: Path) -> bool:
        if path.name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(RunFolder, "is_run", staticmethod(is_run))
    done = titan("runs", "list")
    assert list(rows(done.out)) == ["run", "runs/a", "runs/c"]
    assert done.err == f"{runs / 'b'} cannot be read: Permission denied\n"


def test_a_folder_that_cannot_be_locked_is_not_taken_for_a_dead_run(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: Any, kind: int) -> None:
        raise OSError(37, "No locks available")

    (runs / "c" / "run.lock").touch()
    monkeypatch.setattr("fcntl.flock", no_locks)
    assert RunFolder(runs / "c").in_use() is None
    assert summarize(runs / "c").state == "unknown"
    with pytest.raises(EnvironmentProblem, match="does not exist"):
        RunFolder.open(runs / "z")


def test_a_run_is_completed_from_the_runs_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    from titancli.cli.completion import RunName

    monkeypatch.chdir(runs.parent)
    context = click.Context(click.Command("x"))
    found = RunName().shell_complete(context, click.Argument(["run"]), "runs/")
    assert [item.value for item in found] == ["runs/a", "runs/b", "runs/c"]
    (other,) = RunName().shell_complete(context, click.Argument(["run"]), "elsewhere/")
    assert (other.value, other.type) == ("elsewhere/", "dir")
    assert os.getcwd() == str(runs.parent)


def test_events_from_before_the_version_had_its_name_are_read() -> None:
    event = {"event": "checkpoint", "time": "2026-01-31T12:00:00Z", "step": 1, "path": "p"}
    assert can_be_shown({"version": 1, **event})
    assert not can_be_shown({"version": 2, **event}) and not can_be_shown(event)


def test_rm_names_what_goes_with_a_run(titan: Titan, runs: Path) -> None:
    run = runs / "b"
    (run / "exports/step-4-best").mkdir(parents=True)
    (run / "my notes.txt").touch()
    done = titan("runs", "rm", "runs/b", "--yes")
    assert done.code == 0
    assert "    exports: step-4-best\n" in done.err and "    other files: my notes.txt\n" in done.err
