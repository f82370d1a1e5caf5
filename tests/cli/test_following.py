"""`titan runs logs` and `titan runs watch`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Titan
from tests.cli.run_folders import attempt, began, ended, event, make, step
from tests.observe.test_panel import Terminal
from titancli.cli import following
from titancli.observe import logs
from titancli.observe.logs import Lines
from titancli.observe.panel import Panel
from titancli.runs import RunFolder


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL_SECONDS", 0.005)
    monkeypatch.delenv("TITAN_RUNS", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def log(run: Path, name: str, text: str) -> None:
    with open(run / "logs" / f"{name}.log", "a") as file:
        file.write(text)


def append(run: Path, *events: dict[str, Any]) -> None:
    with open(run / "events.jsonl", "a") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in events)


def finish(run: Path, outcome: dict[str, Any]) -> None:
    RunFolder(run).update_attempt(outcome=outcome)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A run that this process holds."""
    run = make(tmp_path / "r", [began(), step(1, 1)], [attempt()])
    log(run, "rank-0", "one\ntwo\n")
    hold = RunFolder(run).hold()
    yield run
    hold.release()


@pytest.fixture
def meanwhile() -> Iterator[Callable[..., None]]:
    """`meanwhile(f, g, …)`: these are called one after the other while a command runs."""
    threads = []

    def begin(*todo: Callable[[], Any]) -> None:
        def work() -> None:
            for one in todo:
                time.sleep(0.1)
                one()

        threads.append(threading.Thread(target=work))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join()


# ------------------------------------------------------------------------------------------------ logs


@pytest.fixture
def several(tmp_path: Path) -> Path:
    run = make(tmp_path / "r")
    for name in ("rank-10", "rank-0", "rank-2", "launcher"):
        log(run, name, f"first of {name}\nsecond\nno end")
    (run / "logs" / "rank-2.error.json").write_text("{}")
    return run


def test_the_log_of_rank_0_of_another_and_of_all(titan: Titan, several: Path) -> None:
    assert titan("runs", "logs", "r") == (0, "first of rank-0\nsecond\nno end\n", "")
    assert titan("runs", "logs", "r", "--rank", "10", "--lines", "2").out == "second\nno end\n"
    lines = titan("runs", "logs", "r", "--all", "--lines", "1").out.splitlines()
    assert lines == [f"{name}: no end" for name in ("rank-0", "rank-2", "rank-10", "launcher")]


def test_logs_as_json(titan: Titan, several: Path) -> None:
    document = json.loads(titan("runs", "logs", "r", "--rank", "2", "--json").out)
    lines = ["first of rank-2", "second", "no end"]
    one = {"name": "rank-2", "path": str(several / "logs/rank-2.log"), "lines": lines}
    assert document == {"schema": "titan.logs", "version": 1, "logs": [one]}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--rank", "5"), 5, "no log of rank 5\n there are: rank-0, rank-2, rank-10, launcher"),
        (("--rank", "5", "-f"), 5, "no log of rank 5"),
        (("--rank", "0", "--all"), 2, "exclude each other"),
        (("-f", "--json"), 2, "exclude each other"),
        (("--rank", "-1"), 2, "--rank"),
    ],
)
def test_what_cannot_be_printed_is_refused(
    titan: Titan, several: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = titan("runs", "logs", "r", *arguments)
    assert done.code == code and words in done.err and "Traceback" not in done.err


def test_a_run_without_logs_says_where_its_events_are(titan: Titan, tmp_path: Path) -> None:
    make(tmp_path / "r")
    done = titan("runs", "logs", "r")
    assert done.code == 5 and "titan runs watch" in done.err
    assert titan("runs", "logs", "r", "--all") == (0, "", "")


def test_following_goes_over_restarts_and_ends_with_the_run(
    titan: Titan, live: Path, meanwhile: Callable[..., None]
) -> None:
    meanwhile(
        lambda: log(live, "rank-0", "three\nfo"),
        lambda: log(live, "rank-0", "ur\n"),
        lambda: log(live, "rank-1", "another rank, started later\n"),
        lambda: (log(live, "rank-0", "five, without an end"), finish(live, ended("stopped", 7))),
    )
    done = titan("runs", "logs", "r", "-f", "--lines", "1", "--all")
    assert done.code == 0 and done.err == "r: stopped at step 7/100\n"
    assert done.out.splitlines() == [
        *("rank-0: two", "rank-0: three", "rank-0: four"),
        *("rank-1: another rank, started later", "rank-0: five, without an end"),
    ]


def test_a_run_that_is_killed_ends_what_follows_it(
    titan: Titan, live: Path, meanwhile: Callable[..., None]
) -> None:
    made = RunFolder(live)
    (live / "run.lock").unlink()  # as if its holder had died
    meanwhile(lambda: log(live, "rank-0", "last words\n"))
    done = titan("runs", "logs", "r", "-f")
    assert done.code == 0 and done.err == "r: died at step 1/100\n"
    assert made.in_use() is False


def test_a_run_of_another_machine_is_followed_and_its_state_is_told(
    titan: Titan, tmp_path: Path, meanwhile: Callable[..., None]
) -> None:
    run = make(tmp_path / "r", [began()], [attempt(host="elsewhere")])
    log(run, "rank-0", "one\n")
    meanwhile(lambda: finish(run, ended("failed", 3, error="ValueError: bad")))
    done = titan("runs", "logs", "r", "-f")
    assert "cannot be seen whether it still runs on elsewhere" in done.err
    assert done.err.endswith("r: failed at step 3/100: ValueError: bad\n") and done.out == "one\n"


@pytest.mark.parametrize("command", [("logs", "-f"), ("watch",)])
def test_ctrl_c_and_a_folder_that_is_removed_end_it(
    titan: Titan, live: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("titancli.cli.following.time.sleep", interrupt)
    done = titan("runs", command[0], "r", *command[1:])
    assert done.code == 130 and done.err.strip() == ""
    monkeypatch.setattr(
        "titancli.cli.following.time.sleep",
        lambda seconds: (live / "recipe.lock.toml").unlink(missing_ok=True),
    )
    done = titan("runs", command[0], "r", *command[1:])
    assert done.code == 5 and "is not a run folder" in done.err


def test_the_last_lines_are_found_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "BLOCK", 7)
    path = tmp_path / "a.log"
    for text in ("", "\n", "one", "one\n", "one\ntwo\n\nthree", "é" * 9 + "\nlonger than a block\n\n"):
        path.write_text(text)
        lines = text.splitlines()
        for count in range(6):
            reader = Lines(path, count)
            assert [*reader.poll(), *reader.rest()] == lines[max(0, len(lines) - count) :], (text, count)
    reader = Lines(path)
    assert len(list(reader.poll())) == 3
    path.write_bytes(b"made anew \xff\n")
    assert list(reader.poll()) == ["made anew \N{REPLACEMENT CHARACTER}"]
    assert list(Lines(tmp_path / "none.log", 3).poll()) == []


# ----------------------------------------------------------------------------------------------- watch


def test_without_a_terminal_there_are_the_lines_of_train(
    titan: Titan, live: Path, meanwhile: Callable[..., None]
) -> None:
    """A line that is being written is shown when it is whole; a restart goes on; what is unknown is not."""
    whole = json.dumps(step(2, 2, 1.75)).encode()

    def half(data: bytes) -> Callable[[], None]:
        return lambda: (live / "events.jsonl").open("ab").write(data)

    meanwhile(
        half(whole[:30]),
        half(whole[30:] + b"\n"),
        lambda: append(
            live,
            event("of_the_future", 3, anything=[1]),
            {**step(9, 3), "version": 7},
            event("run_start", 3, step=0, mesh="round", world="many"),
            event("log", 3, level="warning", message="a rank failed; all ranks were restarted (restart 1)"),
            event("run_start", 4, step=1, world=2, mesh={"tp": 2}, device="CPU", checkpoint="/x/step-1"),
            event("checkpoint", 5, step=2, path="/x/checkpoints/step-2"),
        ),
        lambda: (append(live, event("run_end", 6, why="finished")), finish(live, ended("finished", 2))),
    )
    done = titan("runs", "watch", "r")
    assert done.code == 0
    assert done.err == "events of format 7 are not shown: this version of titan reads format 1\n"
    assert done.out.splitlines() == [
        "training on CPU, 1 rank",
        "step 1/100  loss 2.0000  lr 1.00e-03  10 tokens/s  ETA —",
        "step 2/100  loss 1.7500  lr 1.00e-03  10 tokens/s  ETA —",
        "warning: a rank failed; all ranks were restarted (restart 1)",
        "training on CPU, 2 ranks (tp 2), from step-1",
        "saved step-2",
        "r: finished at step 2/100",
    ]


def test_at_a_terminal_a_finished_run_shows_its_last_panel(
    titan: Titan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [began(), *(step(n, n, 3.0 - n / 50) for n in range(1, 101))]
    events.append(event("log", 100, level="warning", message="odd"))
    make(tmp_path / "r", [*events, event("run_end", 101, why="finished", step=100)])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    terminal = Terminal()
    monkeypatch.setattr(following, "watcher_for", lambda stream: Panel(terminal))
    done = titan("runs", "watch", "r")
    assert done == (0, "r: finished at step 100/100\n", "")
    assert terminal.screen[:2] == ["training on CPU, 1 rank", "warning: odd"]
    assert "step 100/100" in terminal.screen[2] and "loss 1.0000" in terminal.screen[4]
    assert len(terminal.screen) == 8 and terminal.raw.count("╭") == 2


def test_two_watch_a_live_run_and_change_nothing(
    titan: Titan, live: Path, meanwhile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in live.rglob("*") if path.is_file()}
    screens = [Terminal(), Terminal()]
    waiting = list(screens)
    monkeypatch.setattr(following, "watcher_for", lambda stream: Panel(waiting.pop()))
    other = threading.Thread(target=following.watch, args=(live,), kwargs={"as_json": False})
    other.start()
    meanwhile(lambda: append(live, step(2, 2)), lambda: finish(live, ended("interrupted", 2)))
    assert titan("runs", "watch", "r").out.endswith("r: interrupted at step 2/100\n")
    other.join()
    assert all("step 2/100" in "".join(screen.screen) for screen in screens)
    kept = {path: text for path, text in before.items() if path.name not in ("events.jsonl", "run.json")}
    assert {path: path.read_bytes() for path in kept} == kept


def test_events_as_json_are_passed_on_as_they_are(titan: Titan, tmp_path: Path) -> None:
    future = {**step(2, 2), "version": 7}
    events = [began(), step(1, 1, "NaN"), future]
    make(tmp_path / "r", events, [attempt(ended("finished"))])
    done = titan("runs", "watch", "r", "--json")
    assert [json.loads(line) for line in done.out.splitlines()] == events and done.err == ""


def test_a_run_without_events_is_waited_for(
    titan: Titan, tmp_path: Path, meanwhile: Callable[..., None]
) -> None:
    run = make(tmp_path / "r", [], [attempt()])
    (run / "events.jsonl").unlink()
    hold = RunFolder(run).hold()
    meanwhile(hold.release)
    done = titan("runs", "watch", "r")
    assert (done.code, done.out) == (0, "r: died\n")
