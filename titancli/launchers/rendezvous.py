"""The rendezvous of a run's nodes. Torch-free.

torchrun's rendezvous is a store on one of the nodes, and is gone when that node is. So the run folder says
where it is: the files `rendezvous/1`, `rendezvous/2`, … hold HOST:PORT, the newest is where all meet, and its
node touches it for as long as it is alive. Where that has ended, another node serves a new store and writes
the next file; a file is made once, so only one node can. Whoever finds a newer file moves there.

The second line says with what the node was started. One that was started with something else does not come
in: its ranks would be refused, and those of all others with them.

The disk may work where the network does not: a node that cannot connect to the place writes `N.unreachable`
beside it, and where nobody else is there either, its node leaves the place to another one.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from titancli.errors import EnvironmentProblem
from titancli.files import parse_json, read_bytes, regular
from titancli.launchers.address import reachable

BEAT = 1.0
"""Seconds between two signs of life."""


class Meeting:
    """The place where this node meets the others.

    Args:
        folder: `rendezvous` in the run folder, on a disk that all nodes share.
        patience: seconds without a sign of life after which a node counts as lost.
        same: what must be the same on all nodes, by name.
        reach: seconds after which a place is given up that is alive, but that not all nodes can connect to.
        say: receives one line about such a place.
    """

    def __init__(
        self,
        folder: Path,
        patience: float,
        *,
        same: Mapping[str, str] | None = None,
        reach: float = 150.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._folder, self._patience, self._reach = folder, patience, reach
        self._same, self._say = dict(same or {}), say
        self.endpoint: str | None = None
        """HOST:PORT of the store, once it has been found."""
        self._place: Path | None = None
        self._own: Path | None = None
        self._seen: tuple[Path, int] | None = None
        self._alive = False
        self._quiet = self._looked = self._beaten = self._left = self._asked = self._answered = 0.0
        self._unanswered: tuple[Path, float] | None = None
        """The place that is alive and cannot be reached, and since when."""
        self._knocked: Path | None = None
        """The place of which this node has written that."""

    @property
    def serves(self) -> bool:
        """Return whether the store is this node's."""
        return self._own is not None and self._own == self._place

    def find(self, given_up: Callable[[], bool]) -> bool:
        """Wait for a place whose node is alive and answers, or else open one here.

        Returns:
            False once `given_up` says that nobody waits any more.

        Raises:
            EnvironmentProblem: the folder cannot be written, or could not be read to the last; or the node of
                the place was started with something else than this one.
        """
        self._place = None
        failure: OSError | None = None
        self.leave()
        while not given_up():
            try:
                newest = self._newest()
                silent = newest is None or self._silent(newest)
                failure = None
            except OSError as error:  # of a network disk, often for a moment only
                failure = error
            else:
                if silent:
                    # Who has left a place that others could not reach lets one of them open the next.
                    waits = newest is None and time.monotonic() < self._left + 2 * self._patience
                    if not waits and self._open(0 if newest is None else int(newest.name)):
                        return True
                elif newest and self._alive and (found := _read(newest)):
                    endpoint, same = found
                    self._compare(endpoint, same)
                    if _answers(endpoint):
                        self._place, self.endpoint = newest, endpoint
                        self._asked = self._answered = time.monotonic()
                        if self._knocked == newest:
                            with suppress(OSError):
                                _knocks(newest).unlink(missing_ok=True)
                        return True
                    self._cannot_reach(newest, endpoint)
            time.sleep(0.2)
        if failure is not None:
            raise EnvironmentProblem(
                f"cannot read {self._folder}: {failure.strerror}",
                hint="use a --run-dir that all nodes can read and write",
            ) from failure
        return False

    def beat(self, waiting: Callable[[], bool] = lambda: False) -> bool:
        """Give a sign of life; False where the place is lost, or the others meet elsewhere by now.

        torch may wait for a quarter of an hour for the answer of a store whose node has lost its power.

        Args:
            waiting: whether no ranks run here, since too few nodes are there.
        """
        if time.monotonic() < self._beaten + BEAT:
            return True
        self._beaten = time.monotonic()
        if self._own is not None:
            knocked = False
            with suppress(OSError):  # the disk fails for a moment, or another node has opened the next place
                os.utime(self._own)
                knocked = _knocks(self._own).exists()
            if knocked and waiting():
                self._say(f"other machines cannot connect to {self.endpoint}: one of them serves instead")
                self.leave()
                self._left = time.monotonic()
                return False
        with suppress(OSError):
            if self._place is None or (newest := self._newest()) is None:
                return True
            if newest != self._place:
                return int(newest.name) < int(self._place.name)
            return self.serves or not (self._silent(newest) or self._cut_off())
        return True

    def _cut_off(self) -> bool:
        """Return whether connecting to the endpoint has failed for too long, although the disk shows it to be
        alive."""
        now = time.monotonic()
        if self.endpoint and now > self._asked + self._patience / 4:
            self._asked = now
            if _answers(self.endpoint):
                self._answered = now
        return now > self._answered + self._patience

    def leave(self) -> None:
        """Close the place that this node has opened."""
        if self._own is not None:
            with suppress(OSError):  # it will be silent, which says the same
                _knocks(self._own).unlink(missing_ok=True)
                self._own.unlink(missing_ok=True)
            self._own = None

    def _newest(self) -> Path | None:
        try:
            numbers = [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        except FileNotFoundError:
            return None
        return self._folder / str(max(numbers)) if numbers else None

    def _silent(self, place: Path) -> bool:
        """Return whether the last sign of life is too old. Clocks of hosts are not compared."""
        try:
            with open(
                place, "rb", opener=regular
            ) as file:  # opened, since a network disk may remember old times
                sign = (place, os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            return False
        now = time.monotonic()
        # Where the disk itself hangs, signs that nobody could give or see are not missed.
        self._quiet += min(now - self._looked, 2 * BEAT)
        self._looked = now
        if sign != self._seen:
            self._alive = self._seen is not None and self._seen[0] == place
            self._seen, self._quiet = sign, 0.0
        return self._quiet > self._patience

    def _open(self, last: int) -> bool:
        """Open the place after the last one here; False where another node has just done so."""
        place = self._folder / str(last + 1)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            endpoint = f"{reachable()}:{_free_port()}"
            with open(place, "x", encoding="utf-8") as file:
                file.write(f"{endpoint}\n{json.dumps(self._same)}\n")
        except FileExistsError:
            return False
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot write {place}: {error.strerror}", hint="use a --run-dir that all nodes can write to"
            ) from error
        self._own, self._place, self.endpoint = place, place, endpoint
        for number in range(last, 0, -1):
            with suppress(OSError):  # nobody looks there any more
                before = self._folder / str(number)
                if not before.exists():
                    break
                _knocks(before).unlink(missing_ok=True)
                before.unlink(missing_ok=True)
        return True

    def _compare(self, endpoint: str, same: Mapping[str, str]) -> None:
        """
        Raises:
            EnvironmentProblem: the node there was started with something else.
        """
        for what, here in self._same.items():
            if (there := same.get(what, here)) != here:
                raise EnvironmentProblem(
                    f"this machine was started with different {what} than the run on the others\n"
                    f"  on {endpoint.rpartition(':')[0]}: {_only(there, here)}\n"
                    f"  on {socket.gethostname()}: {_only(here, there)}",
                    hint="run the same command, with the same files, on every node",
                )

    def _cannot_reach(self, place: Path, endpoint: str) -> None:
        """Say so, first to the user and then to the node there."""
        now = time.monotonic()
        if self._unanswered is None or self._unanswered[0] != place:
            self._unanswered = (place, now)
        elif now > self._unanswered[1] + self._reach:
            with suppress(OSError):  # it is tried again
                if not _knocks(place).exists():
                    self._say(f"cannot connect to {endpoint}, which {place} names and which is alive: is its "
                              "name known here, and its port open?")  # fmt: skip
                    _knocks(place).touch()
                    self._knocked = place


def _knocks(place: Path) -> Path:
    return place.with_name(f"{place.name}.unreachable")


def _only(text: str, other: str) -> str:
    """Return the parts of a text that the other lacks; for TOML the lines, each after its table."""
    if "\n" not in text + other:
        return text
    others = _lines(other)
    found = [line for line in _lines(text) if line not in others]
    return "; ".join([*found[:5], *[f"and {len(found) - 5} more"] * (len(found) > 5)]) or "nothing of its own"


def _lines(toml: str) -> list[str]:
    table, found = "", []
    for line in filter(None, toml.splitlines()):
        if line.startswith("["):
            table = f"{line} "
        found.append(line if line.startswith("[") else table + line)
    return found


def _read(place: Path) -> tuple[str, dict[str, str]] | None:
    """HOST:PORT, and with what its node was started; None as long as they are being written."""
    try:
        endpoint, _, rest = read_bytes(place, 1 << 24).decode().partition("\n")
        same = parse_json(rest)
    except (OSError, ValueError):
        return None
    host, _, port = endpoint.rpartition(":")
    texts = isinstance(same, dict) and all(isinstance(value, str) for value in same.values())
    return (endpoint, same) if rest.endswith("\n") and host and port.isdecimal() and texts else None


def _answers(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
