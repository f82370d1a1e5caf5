"""What a run of one rank prints is in logs/rank-0.log as well, as that of one of several."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished
from titancli.observe.panel import Panel
from titancli.process import Tee, copy_into

Train = Callable[..., Finished]

CHATTY = """
import sys
from titancli import component, hookimpl

@component("logger", "chatty", target="chatty:build")
class Chatty:
    "Prints."
    fail: bool = False

class Prints:
    def __init__(self, config):
        print("from a builder")

    def step_end(self, step, metrics):
        print("to stderr", step, file=sys.stderr)
        sys.stdout.writelines(["to stdout\\n"])

def build(config, run_folder, is_main):
    if config.fail:
        raise ValueError("no such logger")
    return Prints(config)

@hookimpl
def titan_components():
    return [Chatty]
"""


@pytest.fixture
def chatty(train: Train, here: Path) -> Train:
    (here / "chatty.py").write_text(CHATTY)
    sys.modules.pop("chatty", None)  # each folder has a copy of its own
    chosen = ("tiny.toml", "-p", "./chatty.py", 'loggers=[{type="chatty"}]', "training.steps=2")
    return lambda *arguments: train(*chosen, "--run-dir", "r", *arguments)


def log(here: Path, run: str = "r") -> list[str]:
    return (here / run / "logs/rank-0.log").read_text().splitlines()


def test_it_has_what_is_printed_and_what_titan_reports_and_goes_on_when_the_run_is_resumed(
    chatty: Train, here: Path
) -> None:
    streams = sys.stdout, sys.stderr
    done = chatty()
    assert done.code == 0, done.err
    assert (sys.stdout, sys.stderr) == streams
    assert "from a builder\n" in done.out and "to stderr 2\n" in done.err
    first = log(here)
    assert first[0].startswith("--- ") and " rank 0 of 1 on " in first[0]
    for begin in ("from a builder", "training on CPU, 1 rank", "to stderr 1", "to stdout", "saved step-2"):
        assert any(line.startswith(begin) for line in first), begin
    assert any(line.startswith("step 2/2  loss ") for line in first)
    assert chatty("--resume", "training.steps=3").code == 0
    again = log(here)
    assert again[: len(first)] == first and "to stderr 3" in again[len(first) :]
    assert sum(" rank 0 of 1 on " in line for line in again) == 2


def test_events_as_json_leave_it_as_it_is(chatty: Train, here: Path) -> None:
    assert chatty("--json").code == 0
    assert "from a builder" in log(here) and not any(line.startswith("{") for line in log(here))


def test_a_run_that_fails_leaves_the_traceback_there_and_gives_the_streams_back(
    chatty: Train, here: Path
) -> None:
    streams = sys.stdout, sys.stderr
    done = chatty("loggers.0.fail=true")
    assert done.code == 1 and "log: " + str(here / "r/logs/rank-0.log") in done.err
    assert (sys.stdout, sys.stderr) == streams
    assert "ValueError: no such logger" in log(here)[-1]
    assert any("Traceback" in line for line in log(here))


def test_a_log_that_cannot_be_written_is_reported_once_and_ends_nothing(chatty: Train, here: Path) -> None:
    (here / "r/logs/rank-0.log").mkdir(parents=True)
    done = chatty()
    assert done.code == 0
    assert done.err.count("cannot write") == 1 and "the run continues without it" in done.err
    assert "from a builder" in done.out


def test_a_full_disk_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[bytes] = []

    def write(descriptor: int, data: bytes) -> int:
        if len(written) < 2:
            written.append(bytes(data[:5]))
            return len(written[-1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stdout", io.StringIO())
    with copy_into(tmp_path / "a.log", "rank 0 of 1"):
        monkeypatch.setattr("titancli.process.os.write", write)
        print("one of two lines")
        print("two")
        assert sys.stdout.getvalue() == "one of two lines\ntwo\n"
    assert written == [b"one o", b"f two"]  # a short write is continued
    assert capsys.readouterr().err.count("(No space left on device); the run continues") == 1


def test_a_terminal_that_goes_away_ends_nothing_and_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("sys.stdout", Gone())
    with copy_into(tmp_path / "a.log", "rank 0 of 1"):
        print("still here")
    assert "still here\n" in (tmp_path / "a.log").read_text()


def test_two_at_once_each_have_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end in any order, and what still holds a stream prints on."""
    real = io.StringIO()
    monkeypatch.setattr("sys.stdout", real)
    one, two = copy_into(tmp_path / "1.log", "one"), copy_into(tmp_path / "2.log", "two")
    one.__enter__()
    two.__enter__()
    held = sys.stdout
    threads = [threading.Thread(target=print, args=(f"{n}" * 40,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.__exit__(None, None, None)
    print("after the first")
    two.__exit__(None, None, None)
    held.write("after both\n")
    texts = [(tmp_path / f"{n}.log").read_text() for n in (1, 2)]
    assert all(f"{n}" * 40 in text for text in texts for n in range(8))
    assert ["after the first" in text for text in texts] == [False, True]
    assert not any("after both" in text for text in texts) and real.getvalue().endswith("after both\n")
    assert sys.stdout is real


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_panel_keeps_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands above the panel is in the log, once, and the panel itself is not."""
    screen: Any = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    panel = Panel(screen)
    with copy_into(tmp_path / "a.log", "rank 0 of 1"):
        tee = sys.stdout
        assert isinstance(tee, Tee)
        panel({"event": "step", "step": 1, "steps": 2, "metrics": {"loss": 1.0}})
        assert sys.stdout is not tee
        print("above")
        print("without an end", end="")
        panel.close()
        assert sys.stdout is tee
    assert sys.stdout is screen
    assert (tmp_path / "a.log").read_text().splitlines()[1:] == ["above", "without an end"]
    assert "above\n" in screen.getvalue() and "step 1/2" in screen.getvalue()
