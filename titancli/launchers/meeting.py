"""Where the nodes of a run meet. Torch-free.

torchrun's rendezvous is a store on one of the nodes, and is gone when that node is. So the run folder says
where it is: the files `rendezvous/1`, `rendezvous/2`, … hold HOST:PORT, the newest is where all meet, and its
node touches it for as long as it is alive. Where that has ended, another node serves a new store and writes
the next file; a file is made once, so only one node can. Whoever finds a newer file moves there.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from titancli.errors import EnvironmentProblem

BEAT = 1.0
"""Seconds between two signs of life."""


class Meeting:
    """The place where this node meets the others.

    Args:
        folder: `rendezvous` in the run folder, on a disk that all nodes share.
        patience: seconds without a sign of life after which a node counts as lost.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self._folder, self._patience = folder, patience
        self.endpoint: str | None = None
        """HOST:PORT of the store, once it has been found."""
        self._place: Path | None = None
        self._own: Path | None = None
        self._seen: tuple[Path, int] | None = None
        self._alive = False
        self._quiet = self._looked = self._beaten = 0.0

    @property
    def serves(self) -> bool:
        """Return whether the store is this node's."""
        return self._own is not None and self._own == self._place

    def find(self, given_up: Callable[[], bool]) -> bool:
        """Wait for a place whose node is alive and answers, or else open one here.

        Returns:
            False once `given_up` says that nobody waits any more.

        Raises:
            EnvironmentProblem: the folder cannot be written, or could not be read to the last.
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
                    if self._open(0 if newest is None else int(newest.name)):
                        return True
                elif newest and self._alive and (endpoint := _read(newest)) and _answers(endpoint):
                    self._place, self.endpoint = newest, endpoint
                    return True
            time.sleep(0.2)
        if failure is not None:
            raise EnvironmentProblem(
                f"cannot read {self._folder}: {failure.strerror}",
                hint="use a --run-dir that all nodes can read and write",
            ) from failure
        return False

    def beat(self) -> bool:
        """Give a sign of life; False where the place is lost, or the others meet elsewhere by now.

        torch may wait for a quarter of an hour for the answer of a store whose node has lost its power.
        """
        if time.monotonic() < self._beaten + BEAT:
            return True
        self._beaten = time.monotonic()
        if self._own is not None:
            with suppress(OSError):  # the disk fails for a moment, or another node has opened the next place
                os.utime(self._own)
        with suppress(OSError):
            if self._place is None or (newest := self._newest()) is None:
                return True
            if newest != self._place:
                return int(newest.name) < int(self._place.name)
            return self.serves or not self._silent(newest)
        return True

    def leave(self) -> None:
        """Close the place that this node has opened."""
        if self._own is not None:
            with suppress(OSError):  # it will be silent, which says the same
                self._own.unlink(missing_ok=True)
            self._own = None

    def _newest(self) -> Path | None:
        try:
            numbers = [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        except FileNotFoundError:
            return None
        return self._folder / str(max(numbers)) if numbers else None

    def _silent(self, place: Path) -> bool:
        """Whether there has been no sign of life for too long. Clocks of hosts are not compared."""
        try:
            with open(place, "rb") as file:  # opened, since a network disk may remember old times
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
            endpoint = f"{socket.getfqdn()}:{_free_port()}"
            with open(place, "x", encoding="utf-8") as file:
                file.write(endpoint)
        except FileExistsError:
            return False
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot write {place}: {error.strerror}", hint="use a --run-dir that all nodes can write to"
            ) from error
        self._own, self._place, self.endpoint = place, place, endpoint
        for number in range(last, 0, -1):
            before = self._folder / str(number)
            if not before.exists():
                break
            before.unlink(missing_ok=True)
        return True


def _read(place: Path) -> str | None:
    try:
        return place.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


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
