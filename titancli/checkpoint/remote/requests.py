"""Requests to a store that may fail now and then, or never answer: retries and a time limit. Torch-free."""

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
"""Seconds for which a failing request is retried while a user waits for the answer."""
LONG = 300.0
"""Seconds for which it is retried in the background."""
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 20.0
"""Maximum seconds between two attempts; each pause is twice the previous one, from `FIRST_PAUSE` on."""
ABSENT = (FileNotFoundError, NotADirectoryError)
"""The only errors that mean that an object does not exist."""
_FINAL = (*ABSENT, TitanError, PermissionError, IsADirectoryError, FileExistsError, NotImplementedError)
"""Errors that are not retried, because another attempt would fail in the same way."""


class Unreachable(TitanError):
    """A request to a store failed. Unlike an `EnvironmentProblem`, it does not mean that a checkpoint is
    missing or cannot be read."""

    exit_code = EXIT_ENVIRONMENT


class Line:
    """The connection to one store, shared by all paths in it."""

    def __init__(self, limit: float, patience: float) -> None:
        """Create the connection; no request is made.

        Args:
            limit: seconds without progress after which a request fails.
            patience: seconds for which a failing request is retried; at most `limit`.
        """
        self.limit, self.patience = limit, min(limit, patience)
        self.stuck: list[threading.Thread] = []
        """Abandoned requests that change the store. One of them may still take effect, so further changes are
        refused until all have ended."""
        self.knows_md5 = True
        """Whether the store's checksums are of the objects' bytes, as far as is known."""

    def ask(
        self,
        place: object,
        doing: str,
        request: Callable[[], T],
        moved: Callable[[], object] = lambda: None,
        *,
        changes: bool = False,
    ) -> T:
        """Return the result of a request to the store. If it fails, it is retried after random, growing
        pauses; if it hangs, it is abandoned.

        Args:
            place: the path, for messages.
            doing: the operation, for messages.
            moved: returns a new value whenever the request has made progress.
            changes: whether the request changes the store.

        Raises:
            Unreachable: every attempt failed, or one made no progress within the limit.
            OSError: the object does not exist, or the local disk is full.
        """
        until, pause = time.monotonic() + self.patience, FIRST_PAUSE
        while True:
            if changes and any(thread.is_alive() for thread in self.stuck):
                raise unreachable(
                    place, f"{doing} was not started, because an earlier request is still unanswered"
                )
            error, answer = self._once(place, doing, request, moved, changes)
            if error is None:
                return answer[0]
            full = isinstance(error, OSError) and error.errno in FULL
            if full or isinstance(error, (TitanError, *ABSENT)) or not isinstance(error, Exception):
                raise error
            wait = pause * random.uniform(
                0.5, 1.0
            )  # so that ranks and runs that failed together do not retry together
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
        """Make a request in a thread, and return its error or its answer."""
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
        except BaseException:  # also Ctrl-C: the thread may run on, and must not keep the process alive
            leave_threads_behind()
            raise
        return (failures[0] if failures else None), answer


def unreachable(place: object, why: str) -> Unreachable:
    return Unreachable(
        f"{place} cannot be reached: {why}",
        hint="check the network, the endpoint and the credentials in the environment (AWS_PROFILE, …)",
    )
