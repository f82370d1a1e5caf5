"""The reason why a run failed: each rank that raises leaves a report, and the cause is chosen among them.
Torch-free.

When one rank dies, the others fail as well, in whatever collective they wait in. Their errors come later, and
are about connections; the cause is the first that is not.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titancli.errors import EXIT_FAILED, RankFailure, TitanError
from titancli.files import read_json
from titancli.registry.error_source import blame
from titancli.runs import timestamp, write_atomically
from titancli.terminal import printable

PASSED_THROUGH = ("titancli/worker/rank.py", "titancli/engine/status.py", "/torch/")


Reports = Mapping[str, tuple[int, int]]
"""Reports by the name of their file; see `there`."""


@dataclass(frozen=True)
class Failure:
    """One rank's end."""

    rank: int
    world: int
    host: str
    step: int | None
    """The step that was being done; None: before the first."""
    type: str
    message: str
    hint: str | None
    exit_code: int
    expected: bool
    """True for a TitanError: its message is complete, and needs no traceback."""
    communication: bool
    """True if it may be no more than the consequence of another rank's end."""
    traceback: str
    time: str
    where: str | None = None
    """The component of a plugin that it came through, and the line of the plugin's code."""

    @property
    def words(self) -> str:
        """The error in one line."""
        return _one_line(self.type, self.message, self.where, expected=self.expected)


def error_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.error.json"


def write(logs: Path, error: BaseException, *, rank: int, world: int, step: int | None) -> None:
    """Write `rank-N.error.json`. A failure to do so is reported on stderr, after the error itself."""
    if isinstance(error, RankFailure) and error.__cause__ is not None:
        error = error.__cause__  # the cause is chosen among all reports; this rank's is what it saw itself
    expected = isinstance(error, TitanError)
    failure = Failure(
        rank=rank,
        world=world,
        host=socket.gethostname(),
        step=step,
        type=type(error).__name__,
        message=error.message if isinstance(error, TitanError) else str(error),
        hint=error.hint if isinstance(error, TitanError) else None,
        exit_code=error.exit_code if isinstance(error, TitanError) else EXIT_FAILED,
        expected=expected,
        communication=is_communication(error),
        traceback=_own_traceback(error),
        time=timestamp(),
        where=_where(error),
    )
    try:
        logs.mkdir(parents=True, exist_ok=True)
        write_atomically(error_file(logs, rank), json.dumps(asdict(failure), indent=2) + "\n")
    except (OSError, TitanError) as second:
        print(f"cannot write the report of this error: {second}", file=sys.stderr)


def there(logs: Path) -> Reports:
    """Return the reports that exist now, to distinguish later ones; clocks are not used."""
    found = {}
    for path in logs.glob("rank-*.error.json"):
        with suppress(OSError):  # its rank has just been started anew
            found[path.name] = _identity(path)
    return found


def read(logs: Path, *, before: Reports | None = None) -> list[Failure]:
    """Return the reports that were not there `before`, in the order in which they were made.

    Ranks go from step to step together, so an earlier step comes first. In one step it is the time at which
    the disk got a report that counts: the clocks of hosts may differ.
    """
    failures = []
    for path in logs.glob("rank-*.error.json"):
        try:
            identity = _identity(path)
            failure = Failure(**read_json(path))
        except (OSError, ValueError, TypeError):
            continue  # half of one, from a disk that is full, or another version's
        if (before or {}).get(path.name) != identity:
            failures.append((-1 if failure.step is None else failure.step, identity, failure))
    return [failure for _, _, failure in sorted(failures, key=lambda found: found[:2])]


def _identity(path: Path) -> tuple[int, int]:
    """Return a file's modification time and inode: each report is written as a new file."""
    found = path.stat()
    return found.st_mtime_ns, found.st_ino


def killed(rank: int, world: int, number: int, step: int | None) -> Failure:
    """Return the failure of a rank that was killed by a signal and left no report."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return Failure(
        rank=rank,
        world=world,
        host=socket.gethostname(),
        step=step,
        type=name,
        message=f"killed by {name}",
        hint="out of memory? Check `dmesg`" if number == signal.SIGKILL else None,
        exit_code=EXIT_FAILED,
        expected=True,
        communication=False,
        traceback="",
        time=timestamp(),
    )


def cause(reports: list[Failure], kills: list[Failure], late_kills: list[Failure]) -> Failure | None:
    """Return the failure of the rank that failed first.

    An error that is not about communication, else a rank that was killed, else the first error there is.
    `late_kills` came when others had failed already: the launcher's own, as a rule.
    """
    own = [failure for failure in reports if not failure.communication]
    return next(iter(own + kills + reports + late_kills), None)


def silent(reports: list[Failure], world: int) -> list[int]:
    """Return the ranks that left no report."""
    return sorted(set(range(world)) - {failure.rank for failure in reports})


def block(failure: Failure, log: Path | None, silent: list[int] | None = None) -> str:
    """Format a failure for the user. Ranks that are `silent` left no report."""
    when = f"at step {failure.step}" if failure.step is not None else "before the first step"
    who = f"rank {failure.rank} of {failure.world} on {failure.host}" if failure.world > 1 else "the run"
    message = failure.message if failure.expected else replace(failure, where=None).words
    lines = [f"{who} failed {when}: {message}"]
    if failure.where:
        lines.append(f" in {failure.where}")
    if failure.hint:
        lines.append(f" {failure.hint}")
    if failure.communication:
        lines.append(f" no rank reported a cause: {_others(silent or [], log)}")
    if not failure.expected:
        lines += ["", failure.traceback.rstrip(), ""]
    if log is not None:
        lines.append(f"log: {log}")
    return printable("\n".join(lines), "\n\t")


def _others(silent: list[int], log: Path | None) -> str:
    if not silent or log is None:
        return "another rank may hang or be unreachable; see the logs of all ranks"
    who = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent[:8]))}"
    return f"{who} may hang or be unreachable; see {log.with_name(f'rank-{silent[0]}.log')}"


def words(error: BaseException) -> str:
    """Return an error in one line."""
    message = error.message if isinstance(error, TitanError) else str(error)
    return _one_line(type(error).__name__, message, _where(error), expected=isinstance(error, TitanError))


def _where(error: BaseException) -> str | None:
    if is_communication(error):  # a loop of a plugin waits for the others too
        return None
    found = blame(error)
    return str(found) if found else None


def _one_line(type_name: str, message: str, where: str | None, *, expected: bool) -> str:
    first_line = message.strip().partition("\n")[0]
    words = first_line if expected else f"{type_name}: {first_line}" if first_line else type_name
    return f"{words} (in {where})" if where else words


def _own_traceback(error: BaseException) -> str:
    """Return the traceback without the frames that errors only pass through: the worker's, the engine's
    turnstile, and torch's but the last.

    The whole of it is in the rank's log.
    """
    trace = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in trace.stack if not any(part in frame.filename for part in PASSED_THROUGH)]
    if trace.stack and trace.stack[-1] not in frames:
        frames.append(trace.stack[-1])
    trace.stack = traceback.StackSummary.from_list(frames)
    return "".join(trace.format())


def is_communication(error: BaseException) -> bool:
    """Return whether the error may be no more than the consequence of another rank's end."""
    if isinstance(error, RankFailure) or type(error).__name__ in (
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    ):
        return True
    text = str(error).lower()
    words = ("connection closed", "connection reset", "gloo", "nccl", "broken pipe", "timed out")
    return isinstance(error, RuntimeError) and any(word in text for word in words)
