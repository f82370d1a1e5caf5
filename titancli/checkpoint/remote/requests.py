"""Requests to a store that fails now and then, or does not answer at all. Torch-free."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from titancli.checkpoint.format.disk import FULL
from titancli.errors import EXIT_ENVIRONMENT, TitanError
from titancli.signals import leave_threads_behind

T = TypeVar("T")

logger = logging.getLogger(__name__)

BRIEFLY = 20.0
"""Seconds for which a failing request is repeated where somebody waits for the answer."""
LONG = 300.0
"""The same, where nobody does."""
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 20.0
"""Seconds between two attempts; each pause is twice the one before."""
ABSENT = (FileNotFoundError, NotADirectoryError)
"""How a store says that something is not there. Nothing else says so."""
_FINAL = (*ABSENT, TitanError, PermissionError, IsADirectoryError, FileExistsError, NotImplementedError)
"""What another attempt would not change."""


class Unreachable(TitanError):
    """A store did not do what it was asked to. It says nothing about what lies there, so this is no
    `EnvironmentProblem`, which a checkpoint that cannot be read is."""

    exit_code = EXIT_ENVIRONMENT


class Line:
    """The way to one store, which all places in it share."""

    def __init__(self, limit: float, patience: float) -> None:
        """
        Args:
            limit: seconds without progress after which a request has failed.
            patience: seconds for which a request that the store has refused is repeated; at most `limit`.
        """
        self.limit, self.patience = limit, min(limit, patience)
        self.stuck: list[threading.Thread] = []
        """Requests that change something, and that nobody waits for any longer: one of them may go on later,
        so nothing is to be changed before it ends."""
        self.knows_md5 = True
        """Whether what this store calls a checksum is one of the bytes, as far as is known."""

    def ask(
        self,
        place: object,
        doing: str,
        request: Callable[[], T],
        moved: Callable[[], object] = lambda: None,
        *,
        changes: bool = False,
    ) -> T:
        """Return what a request to the store returns. One that fails is repeated, after pauses of random and
        growing length; one that hangs is left.

        Args:
            moved: returns something else whenever the request has got further.
            changes: the request changes what the store has.

        Raises:
            Unreachable: the store has its own classes of errors, and said so each time; or it has not
                answered within the limit.
            OSError: what was asked for is not there, or the disk is full: that is left to who asks.
        """
        until, pause = time.monotonic() + self.patience, FIRST_PAUSE
        while True:
            if changes and any(thread.is_alive() for thread in self.stuck):
                raise unreachable(place, f"{doing} has not begun: the store has still not answered before")
            error, answer = self._once(place, doing, request, moved, changes)
            if error is None:
                return answer[0]
            full = isinstance(error, OSError) and error.errno in FULL
            if full or isinstance(error, (TitanError, *ABSENT)) or not isinstance(error, Exception):
                raise error
            wait = pause * random.uniform(0.5, 1.0)  # ranks and runs that failed together do not return so
            if isinstance(error, _FINAL) or time.monotonic() + wait > until:
                raise unreachable(place, f"{type(error).__name__}: {error}") from error
            logger.debug("%s: %s failed (%s), trying again in %.1f s", place, doing, error, wait)
            time.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _once(
        self,
        place: object,
        doing: str,
        request: Callable[[], T],
        moved: Callable[[], object],
        changes: bool,
    ) -> tuple[BaseException | None, list[T]]:
        """Make a request in a thread; return its error, or its answer."""
        answer: list[T] = []
        failures: list[BaseException] = []

        def work() -> None:
            try:
                answer.append(request())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work, name="titan-store", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                before = moved()
                thread.join(self.limit)
                if thread.is_alive() and moved() == before:
                    if changes:
                        self.stuck.append(thread)
                    raise unreachable(
                        place,
                        f"{doing} has made no progress for {self.limit:g} seconds (the limit is "
                        "checkpoint.remote_timeout_seconds)",
                    )
        except BaseException:  # Ctrl-C, too: after that a thread that works on is not called alive
            leave_threads_behind()
            raise
        return (failures[0] if failures else None), answer


def unreachable(place: object, why: str) -> Unreachable:
    return Unreachable(
        f"{place} cannot be reached: {why}",
        hint="check the network, the endpoint and the credentials in the environment (AWS_PROFILE, …)",
    )
