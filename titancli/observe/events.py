"""`events.jsonl`: what happened in a run, one JSON object a line, flushed as it happens. Torch-free.

Every line has `version` (the format), `event`, `time` (UTC) and what the event brings along:

| event | fields |
|---|---|
| run_start | attempt, step, steps, world, mesh, device, checkpoint and epochs (in words), which may be null |
| step | step, steps, metrics |
| validation | step, seconds, metrics |
| checkpoint | step, path |
| log | level, message |
| run_end | why, signal, step, checkpoint, metrics; error, where it failed |

A resumed or restarted run appends. Numbers that JSON cannot hold are the strings NaN, Infinity, -Infinity.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.files import json_text, parse_json, regular
from titancli.runs import timestamp

EVENTS_FORMAT = 1

NEEDED: dict[str, dict[str, type]] = {
    "run_start": {"step": int, "time": str},
    "step": {"step": int, "steps": int, "metrics": dict, "time": str},
    "validation": {"step": int, "metrics": dict, "time": str},
    "checkpoint": {"step": int, "path": str, "time": str},
    "log": {"level": str, "message": str, "time": str},
    "run_end": {"why": str, "time": str},
}
"""By event, the fields without which it cannot be shown."""
OPTIONAL: dict[str, dict[str, type]] = {
    "run_start": {"world": int, "mesh": dict, "checkpoint": str, "epochs": str}
}
"""By event, the fields that may be absent or null."""
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
BLOCK = 64 * 1024
"""Bytes that are read at once from the end of a file."""

LONGEST = 1 << 24
"""Bytes of a line; what is longer, titan has not written."""

Listener = Callable[[dict[str, Any]], None]

logger = logging.getLogger(__name__)


class EventLog:
    """Appends events to a file and hands each one to the listeners; any thread may write.

    A file that cannot be written (a full disk) is reported once and does not end the run.

    Raises:
        EnvironmentProblem: it cannot be opened.
    """

    def __init__(self, path: Path, listeners: tuple[Listener, ...] = ()) -> None:
        self._listeners = listeners
        self._mutex = threading.RLock()
        try:
            self._file = open(path, "a", encoding="utf-8", opener=regular)  # noqa: SIM115 - closed by close()
            self._partial = _ends_in_a_partial_line(path)
        except OSError as error:
            raise EnvironmentProblem(f"cannot write {path}: {error.strerror}") from error
        self._healthy = True

    def write(self, event: str, **fields: Any) -> None:
        record = plain({"version": EVENTS_FORMAT, "event": event, "time": timestamp(), **fields})
        with self._mutex:
            self._append(json_text(record))
            for listener in self._listeners:
                try:
                    listener(record)
                except OSError:  # the terminal or the reader has gone away: no reason to end the run
                    self._listeners = tuple(other for other in self._listeners if other is not listener)

    def _append(self, line: str) -> None:
        # Bytes at once and unbuffered: a failed write must not come back with the next one.
        data = ("\n" if self._partial else "") + line + "\n"
        try:
            os.write(self._file.fileno(), data.encode())
            self._partial = False
        except OSError as error:
            self._partial = True
            if self._healthy:
                self._healthy = False
                logger.warning("cannot write %s (%s); the run continues without it", self._file.name, error)

    def close(self) -> None:
        with self._mutex:
            self._file.close()


class EventLogger:
    """The event log as one of a run's loggers (see `titancli.protocols.Logger`)."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._steps = 0

    def run_start(self, info: dict[str, Any]) -> None:
        self._steps = info["steps"]
        names = ("attempt", "step", "world", "mesh", "device", "checkpoint", "epochs")
        self._log.write("run_start", steps=self._steps, **{name: info.get(name) for name in names})

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        self._log.write("step", step=step, steps=self._steps, metrics=metrics)

    def validated(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        self._log.write("validation", step=step, seconds=seconds, metrics=metrics)

    def checkpoint_saved(self, step: int, path: Path) -> None:
        self._log.write("checkpoint", step=step, path=str(path))

    def run_end(self, outcome: dict[str, Any]) -> None:
        self._log.write("run_end", **outcome)


class LogHandler(logging.Handler):
    """Turns messages of titan's own loggers into events, so that they reach users through a launcher as
    well."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write("log", level=record.levelname.lower(), message=self.format(record))


@contextmanager
def logs_as_events(log: EventLog) -> Iterator[None]:
    """Turn messages of titan's own loggers inside the block into events, from level INFO on."""
    titan = logging.getLogger("titancli")
    handler = LogHandler(log)
    titan.addHandler(handler)
    propagate, titan.propagate = titan.propagate, False
    level = titan.level
    titan.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        titan.removeHandler(handler)
        titan.propagate = propagate
        titan.setLevel(level)


class Tail:
    """Reads what is appended to an event log from now on, or from its first line."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() and not from_start else 0

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the events written since the last call; an incomplete line is left for the next call."""
        try:
            with open(self._path, "rb", opener=regular) as file:
                file.seek(self._offset)
                while whole := (data := file.read(LONGEST)).rfind(b"\n") + 1:
                    self._offset = file.seek(self._offset + whole)
                    yield from parse(data[:whole])
        except OSError:  # it is not there yet, or a network disk fails for a moment
            return


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events of a file; incomplete lines, left by a process that was killed, are skipped."""
    if not path.exists():
        return []
    try:
        return list(in_order(path))
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error


def in_order(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the same, one by one.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb", opener=regular) as file:
        while (line := file.readline(LONGEST)) and (len(line) < LONGEST or line.endswith(b"\n")):
            yield from parse(line)


def backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file that can be shown, the last one first; reads only as much as is consumed.

    A file that is not there, or cannot be read, has none.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            position, rest = file.seek(0, os.SEEK_END), b""
            while position > 0:
                size = min(BLOCK, position)
                position -= size
                file.seek(position)
                first, *lines = (file.read(size) + rest).split(b"\n")
                if position == 0:
                    lines, first = [first, *lines], b""
                rest = first
                for line in reversed(lines):
                    yield from filter(can_be_shown, parse(line))
                if len(rest) > LONGEST:
                    return
    except OSError:
        return


def can_be_shown(event: dict[str, Any]) -> bool:
    """Return whether an event is of this format and has what those who draw it need.

    Another version of titan, or a disk that failed, may have left others.
    """
    if format_of(event) != str(EVENTS_FORMAT):
        return False
    needed, optional = (fields.get(str(event["event"]), {}) for fields in (NEEDED, OPTIONAL))
    if not all(isinstance(event.get(name), kind) for name, kind in needed.items()):
        return False
    if not all(isinstance(event.get(name), (kind, type(None))) for name, kind in optional.items()):
        return False
    return event["event"] not in ("step", "validation") or are_metrics(event["metrics"])


def format_of(event: dict[str, Any]) -> str:
    """Return the format that an event says it has."""
    return str(event.get("version"))


def are_metrics(value: Any) -> bool:
    """Return whether a value is a table of numbers, as events have them."""
    return isinstance(value, dict) and all(one is None or _is_number(one) for one in value.values())


def _is_number(value: Any) -> bool:
    try:
        return (isinstance(value, (int, float)) and float(value) is not None) or value in NOT_FINITE
    except OverflowError:
        return False


def parse(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            event = parse_json(line)
        except ValueError:
            continue  # cut off when its writer was killed
        if isinstance(event, dict) and "event" in event:
            yield event


def plain(value: Any) -> Any:
    """Return a value as plain JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def _ends_in_a_partial_line(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
