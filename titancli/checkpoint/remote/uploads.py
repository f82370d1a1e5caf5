"""Checkpoints on their way to an object store while training goes on: `checkpoint.remote`. Torch-free."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path

from titancli.checkpoint.format.disk import size_text
from titancli.checkpoint.format.manifest import Manifest, read_manifest, steps
from titancli.checkpoint.remote.transfer import discard, sweep, upload
from titancli.errors import EnvironmentProblem, TitanError
from titancli.signals import leave_threads_behind

logger = logging.getLogger(__name__)


SLICE = 0.2
"""Seconds after which who waits for an upload looks whether a signal has come."""


class Uploads:
    """Keeps a run's checkpoints in a store as they are in its folder; for one rank.

    `wake` when one was saved: a thread then puts what is missing there, the newest first, and after that
    deletes all but the newest `keep` of this run. What fails is told at once, and tried again with the next.

    The thread is a daemon: a store that never answers keeps nobody from leaving.
    """

    def __init__(
        self,
        folder: Path,
        place: Path,
        run_id: str,
        keep: int,
        *,
        read_back: bool = False,
        leaving: Callable[[], bool] = lambda: False,
        exit_seconds: float = 60.0,
    ) -> None:
        """`read_back`: see `upload`. `leaving`: whether a signal has come; then nobody waits for longer than
        `exit_seconds`."""
        self._folder, self._place, self._run_id, self._keep = folder, place, run_id, keep
        self._read_back, self._leaving, self._exit_seconds = read_back, leaving, exit_seconds
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False
        self._error: Exception | None = None
        self._there: dict[str, Manifest] = {}
        """What is known to be in the store."""
        self._deadline: float | None = None
        self.busy: Path | None = None
        """The checkpoint under way; it must stay where it is."""

    def wake(self) -> None:
        """There is something new. Returns at once."""
        with self._lock:
            self._again = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="titan-upload", daemon=True)
                self._thread.start()

    def settle(self) -> bool:
        """Wait until what was asked for is done, or has failed: each request to the store has its limit.
        After a signal wait no longer than `exit_seconds`, and return whether that was enough."""
        with self._lock:
            thread, told = self._thread, None
        try:
            while thread is not None and thread.is_alive():
                if self._deadline is None and self._leaving():
                    self._deadline = time.monotonic() + self._exit_seconds
                left = SLICE if self._deadline is None else min(SLICE, self._deadline - time.monotonic())
                if left <= 0:
                    leave_threads_behind()
                    return False
                thread.join(left)
                if told != self.busy and (busy := self.busy) is not None:
                    logger.info("waiting for the upload of %s to %s", busy.name, self._place)
                    told = busy
        except KeyboardInterrupt:
            leave_threads_behind()
            raise
        return True

    def finish(self) -> bool:
        """Ensure that the newest checkpoints are there, and return True. After a signal this is given up
        in time: a warning says what is missing, and False is returned.

        Raises:
            TitanError: they are not, at the second attempt; or the store takes nothing any more.
        """
        in_time = self.settle()
        for _ in range(2):
            if in_time and self._thread is None:
                self.wake()
                in_time = self.settle()
            if not in_time or self._error is None:
                break
        error = self._error
        if in_time and error is not None and not self._leaving():
            raise TitanError(
                f"the run has ended, but not all of its checkpoints in {self._folder} were uploaded to "
                f"{self._place}: {_words(error)}",
                hint=f"resume it, which uploads them: {self._again_by()}",
            ) from error
        missing = [path.name for path, manifest in self._here() if self._there.get(path.name) != manifest]
        if missing:
            logger.warning(
                "not known to be in %s: %s (%s); to upload them, resume the run: %s",
                self._place,
                ", ".join(reversed(missing)),
                _words(error)
                if error is not None
                else f"no more than {self._exit_seconds:g} seconds are waited for after a signal, see "
                "checkpoint.remote_exit_seconds",
                self._again_by(),
            )
        return not missing

    def _again_by(self) -> str:
        return f"titan train {shlex.quote(str(self._folder.parent))} --resume"

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            self._error = self._try("a checkpoint was not uploaded", self._upload_missing)
            if self._error is None:
                self._try("older checkpoints in the store are not deleted", self._tidy)

    def _try(self, failure: str, work: Callable[[], None]) -> Exception | None:
        """Return what kept a work from being done; training goes on, whatever it is."""
        try:
            work()
        except Exception as error:
            logger.warning(
                "%s; the next save tries again: %s",
                failure,
                _words(error),
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
            return error
        return None

    def _upload_missing(self) -> None:
        while (path := self._missing()) is not None:
            self._upload(path)

    def _missing(self) -> Path | None:
        """Return the newest one that is not in the store. A listing may be of some time ago: what has been
        put there since is there."""
        here = self._here()
        if any(self._there.get(path.name) != manifest for path, manifest in here):
            self._there |= {path.name: manifest for path, manifest in steps(self._place).items()}
        return next((path for path, manifest in here if self._there.get(path.name) != manifest), None)

    def _upload(self, path: Path) -> None:
        began = time.perf_counter()
        self.busy = path
        try:
            manifest = read_manifest(path)
            upload(path, self._place / path.name, read_back=self._read_back)
            self._there[path.name] = manifest
        except (FileNotFoundError, EnvironmentProblem):
            if path.exists():  # else it has made way for newer ones
                raise
            return
        finally:
            self.busy = None
        size = sum(digest.size for digest in manifest.files.values())
        seconds = time.perf_counter() - began
        logger.info("uploaded %s to %s: %s in %.1f s", path.name, self._place, size_text(size), seconds)

    def _here(self) -> list[tuple[Path, Manifest]]:
        """Return those that are to be in the store, the newest first."""
        return self._mine(self._folder)[: self._keep or None]

    def _tidy(self) -> None:
        sweep(self._place, self._run_id)
        if not self._keep:
            return
        here = {path.name for path, _ in self._here()}
        # A run that went back has fewer saves behind it than what it left in the store.
        mine = sorted(self._mine(self._place), key=lambda found: found[0].name not in here)
        for path, manifest in mine[self._keep :]:
            self._there.pop(path.name, None)
            discard(path, manifest)

    def _mine(self, folder: Path) -> list[tuple[Path, Manifest]]:
        """This run's checkpoints, the newest first."""
        return [
            (path, manifest) for path, manifest in steps(folder).items() if manifest.run_id == self._run_id
        ]


def _words(error: Exception) -> str:
    if not isinstance(error, TitanError):
        return f"{type(error).__name__}: {error}"
    return f"{error.message} ({error.hint})" if error.hint else error.message
