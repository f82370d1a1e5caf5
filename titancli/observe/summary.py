"""A run folder's summary of its run: `titan runs`. Torch-free.

Folders are read while runs write them, after machines died, and after other versions of titan: unreadable
parts are named in `Summary.problems`, and never mistaken for something else.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from titancli.closing import is_closing
from titancli.errors import EnvironmentProblem
from titancli.observe import notes
from titancli.observe.console import numbers
from titancli.observe.events import are_metrics, backwards
from titancli.runs import RECORD_FORMAT, STEP_NAME, RunFolder

ENDS = ("finished", "data_ended", "stopped", "interrupted", "failed")
"""How a run can say that it ended. Beside these its state is one of:

running
    A process holds the folder.
closing
    It has done its last step, but an evaluation, exports or uploads are left: a resume does them.
died
    It has no outcome, and no process of this machine, where it ran, holds the folder: it was killed.
unknown
    Nothing says which: it ran on another machine, whose locks may not be seen from here, or its files cannot
    be read.
"""
CUT_SHORT = ("stopped", "interrupted", "failed", "died")
"""How a run ends before its end."""


@dataclass(frozen=True)
class Summary:
    """One run at a glance."""

    path: Path
    state: str
    """One of `ENDS`, or `running`, `closing`, `died`, `unknown`."""
    recipe: str | None
    """The recipe's name."""
    step: int | None
    """Steps done."""
    steps: int | None
    """Steps to do."""
    metrics: dict[str, float | None]
    """The last that were logged."""
    created: str | None
    """UTC, as `titancli.runs.timestamp` writes it; this and the next."""
    updated: str | None
    """The last sign of life."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """As in run.json."""
    error: str | None = None
    """Why it failed."""
    problems: list[str] = field(default_factory=list)
    """Unreadable parts, a phrase each; and the reason if the state is unknown."""
    note: str | None = None
    """A user's note: `titan runs note`."""

    @property
    def host(self) -> str | None:
        """The machine that the newest attempt was started on."""
        return self.attempts[-1].get("host") if self.attempts else None

    @property
    def checkpoints(self) -> list[int]:
        """The steps that have a checkpoint here, by its name."""
        try:
            found = [STEP_NAME.match(entry.name) for entry in RunFolder(self.path).checkpoints.iterdir()]
        except OSError:
            return []
        return sorted(int(match[1]) for match in found if match)


def runs_in(folder: Path) -> tuple[list[Summary], list[str]]:
    """Return the runs directly below a folder, oldest first, and a line for each that cannot be looked at.

    A link counts as the run that it leads to; a run that lies beside it is not named twice.

    Raises:
        EnvironmentProblem: the folder cannot be read.
    """
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: (entry.is_symlink(), entry.name))
    except OSError as error:
        raise EnvironmentProblem(f"{folder} cannot be read: {error.strerror}") from error
    found: dict[Path, Summary] = {}
    unreadable: list[str] = []
    for entry in entries:
        try:
            if not entry.name.startswith(".") and RunFolder.is_run(entry):
                found.setdefault(entry.resolve(), summarize(entry))
        except OSError as error:  # another user's
            unreadable.append(f"{entry} cannot be read: {error.strerror}")
    return sorted(found.values(), key=lambda run: (run.created or "", run.path.name)), unreadable


def summarize(path: Path, *, look_back: int = 0) -> Summary:
    """Return what a run folder says, whatever state its files are in.

    Args:
        look_back: in how many events before the last step an evaluation is looked for.
    """
    folder, problems = RunFolder(path), []
    record: dict[str, Any] = {}
    try:
        record = _checked(folder.record())
        if not record:
            problems.append("there is no run.json")
    except EnvironmentProblem as error:
        problems.append(error.message)
    note = None
    try:
        note = notes.read(path)
    except EnvironmentProblem as error:
        problems.append(error.message)
    attempts: list[dict[str, Any]] = record.get("attempts") or []
    newest = attempts[-1] if attempts else {}
    outcome = newest.get("outcome") or {}
    last = _Last.of(backwards(folder.events), look_back)
    state, why = _state(folder, newest, outcome.get("why") or (last.why if not attempts else None))
    done, metrics = outcome.get("step"), outcome.get("metrics")
    done = done if isinstance(done, int) else last.step
    saved = (folder.checkpoints / f"step-{done}").is_dir()
    if state in CUT_SHORT and saved and is_closing(attempts, last.steps, done):
        state = "closing"
    return Summary(
        path=path,
        state=state,
        recipe=record.get("name"),
        step=done,
        steps=last.steps,
        metrics=numbers({"metrics": metrics}) if metrics else last.metrics,
        created=record.get("created"),
        updated=last.time or newest.get("ended") or newest.get("started"),
        attempts=attempts,
        error=outcome.get("error"),
        problems=problems + why,
        note=note,
    )


def state_line(run: Summary) -> str:
    """E.g. `failed at step 3/100: ValueError: no rows`."""
    step = "" if run.step is None else f" at step {run.step}" + (f"/{run.steps}" if run.steps else "")
    return f"{run.state.replace('_', ' ')}{step}{f': {run.error}' if run.error else ''}"


@dataclass
class _Last:
    """The last entries of an event log."""

    step: int | None = None
    steps: int | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    time: str | None = None
    why: str | None = None

    @classmethod
    def of(cls, events: Iterator[dict[str, Any]], look_back: int) -> _Last:
        """`events`: the last one first. No more are taken than are needed."""
        last = cls()
        for event in events:
            if event["event"] == "validation":
                last.metrics = numbers(event) | last.metrics
            kind, step = event["event"], event.get("step")
            last.time = last.time or event.get("time")
            if kind in ("run_start", "run_end"):
                last.why = last.why or (event["why"] if kind == "run_end" else "running")
            if last.step is None and kind != "log" and isinstance(step, int):
                last.step = step
            if last.steps is None and isinstance(event.get("steps"), int):
                last.steps = event["steps"]
            # After a resume from an earlier checkpoint the log goes back; what came after it is void.
            if kind == "step" and last.step is not None and event["step"] <= last.step:
                last.metrics = numbers(event) | last.metrics
                break
        if not any(name.startswith("validation/") for name in last.metrics):
            for event in itertools.islice(events, look_back):
                if event["event"] == "validation" and event["step"] <= (last.step or 0):
                    last.metrics = last.metrics | numbers(event)
                    break
        return last


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record in a form that can be shown.

    Raises:
        EnvironmentProblem: it has no format, or contents that titan has not written.
    """
    if record and "format" not in record:
        raise EnvironmentProblem(
            f"run.json has format None, but this version of titan reads format {RECORD_FORMAT}"
        )
    for attempt in record.get("attempts", []):
        outcome = attempt.get("outcome") or {}
        if not are_metrics(outcome.get("metrics") or {}):
            raise EnvironmentProblem("run.json has an invalid outcome")
    return record


def _state(folder: RunFolder, attempt: Mapping[str, Any], why: str | None) -> tuple[str, list[str]]:
    """Return the state, and the reasons if it is unknown."""
    if why in ENDS:
        return str(why), []
    in_use = folder.in_use()
    if in_use:
        return "running", []
    if not attempt:
        return "unknown", []
    host, here = attempt.get("host"), socket.gethostname()
    if host != here:
        reason = f"it has no outcome, and from {here} it cannot be seen whether it still runs on {host}"
        return "unknown", [reason]
    if in_use is None:
        return "unknown", ["it has no outcome, and its lock files cannot be read"]
    return "died", []


def seconds_since(time: str | None, *, now: datetime | None = None) -> float | None:
    """Return the age of a timestamp in seconds, 0 if it lies ahead (two clocks); None if it is none."""
    try:
        then = datetime.fromisoformat(time or "")
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return max(0.0, ((now or datetime.now(UTC)) - then).total_seconds())
