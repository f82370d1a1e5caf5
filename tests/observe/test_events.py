"""The event log and its reader."""

from __future__ import annotations

import errno
import json
import logging
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from titancli.errors import EnvironmentProblem
from titancli.observe.events import EventLog, EventLogger, LogHandler, Tail, read_events


def test_every_line_is_versioned_json_that_any_parser_reads(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("step", step=1, metrics={"loss": float("nan"), "max": float("-inf"), "lr": 0.5})
    log.close()
    [line] = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert event["version"] == 1
    assert event["metrics"] == {"loss": "NaN", "max": "-Infinity", "lr": 0.5}


def test_a_restart_appends_and_repairs_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write("run_start")
    with open(path, "a") as file:
        file.write('{"event": "st')
    EventLog(path).write("run_end")
    assert [event["event"] for event in read_events(path)] == ["run_start", "run_end"]


def test_a_log_that_cannot_be_opened_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(EnvironmentProblem, match=r"cannot write .*events\.jsonl: Is a directory"):
        EventLog(tmp_path / "events.jsonl")


def test_listeners_get_each_event_as_it_is_written(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    EventLog(tmp_path / "events.jsonl", (seen.append,)).write("checkpoint", step=3, path="p")
    assert seen == read_events(tmp_path / "events.jsonl")


def test_a_full_disk_is_said_once_and_events_still_reach_the_listeners(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[dict[str, Any]] = []
    log = EventLog(tmp_path / "events.jsonl", (seen.append,))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with caplog.at_level(logging.WARNING):
            for step in range(5):
                log.write("step", step=step, metrics={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    log.write("run_end", why="finished")
    assert len(seen) == 6
    assert len(caplog.records) == 1
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["step", "run_end"]


def test_a_listener_whose_terminal_is_gone_is_dropped_and_the_others_are_not(tmp_path: Path) -> None:
    calls: list[str] = []

    def gone(event: dict[str, Any]) -> None:
        calls.append("gone")
        raise OSError(5, "Input/output error")

    log = EventLog(tmp_path / "events.jsonl", (gone, lambda event: calls.append(event["event"])))
    log.write("step", step=1)
    log.write("step", step=2)
    assert calls == ["gone", "step", "step"]
    assert len(read_events(tmp_path / "events.jsonl")) == 2


def test_the_tail_gives_whole_new_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "old"}\n')
    tail = Tail(path)
    assert list(tail.poll()) == []
    with open(path, "a") as file:
        file.write('{"event": "a"}\n{"event": "b"')
    assert [event["event"] for event in tail.poll()] == ["a"]
    with open(path, "a") as file:
        file.write("}\n")
    assert [event["event"] for event in tail.poll()] == ["b"]


def test_the_tail_waits_for_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "events.jsonl")
    assert list(tail.poll()) == []
    EventLog(tmp_path / "events.jsonl").write("run_start")
    assert [event["event"] for event in tail.poll()] == ["run_start"]


def test_the_tail_goes_on_after_a_disk_that_failed_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    tail = Tail(tmp_path / "events.jsonl")
    log.write("log", level="info", message="one")

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", fails)
        assert list(tail.poll()) == []
    assert [event["message"] for event in tail.poll()] == ["one"]


def test_warnings_of_titan_become_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    handler = LogHandler(log)
    handler.handle(logging.LogRecord("titancli.x", logging.WARNING, "", 0, "step %d is odd", (3,), None))
    [event] = read_events(tmp_path / "events.jsonl")
    assert (event["level"], event["message"]) == ("warning", "step 3 is odd")


def test_the_logger_writes_each_kind_of_event(tmp_path: Path) -> None:
    logger = EventLogger(EventLog(tmp_path / "events.jsonl"))
    info = {"step": 0, "steps": 9, "world": 2, "mesh": {"dp_shard": 2}}
    logger.run_start(info | {"recipe": {"large": "not written"}})
    logger.step_end(1, {"loss": 2.0})
    logger.checkpoint_saved(1, tmp_path / "step-1")
    logger.run_end({"why": "finished", "signal": None, "step": 1, "checkpoint": None})
    events = read_events(tmp_path / "events.jsonl")
    assert [event["event"] for event in events] == ["run_start", "step", "checkpoint", "run_end"]
    assert "recipe" not in events[0]
    assert events[1]["steps"] == 9
