"""Uploading checkpoints to an object store while training continues: `checkpoint.remote`. Torch-free."""

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
"""Seconds between two checks for a signal while waiting for an upload."""


class Uploads:
    """Keeps a run's checkpoints in a store equal to those in its folder; used by one rank.

    Call `wake` after each save. A thread then uploads what the store lacks, newest first, and deletes all but
    the newest `keep` of this run. A failure is logged at once, and the upload is retried at the next save.

    The thread is a daemon: a store that never answers does not keep the process from exiting.
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
        """Prepare uploads; nothing is uploaded before `wake`.

        Args:
            folder: the run's folder of checkpoints.
            place: the folder in the store.
            keep: number of checkpoints to keep in the store; 0: all.
            read_back: see `upload`.
            leaving: returns whether a signal has come.
            exit_seconds: maximum seconds to wait for uploads after a signal.
        """
        self._folder, self._place, self._run_id, self._keep = folder, place, run_id, keep
        self._read_back, self._leaving, self._exit_seconds = read_back, leaving, exit_seconds
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False
        self._error: Exception | None = None
        self._there: dict[str, Manifest] = {}
        """Checkpoints known to be in the store, by name."""
        self._deadline: float | None = None
        self.busy: Path | None = None
        """The checkpoint that is being uploaded, which must not be deleted."""

    def wake(self) -> None:
        """Start uploading in the background after a save."""
        with self._lock:
            self._again = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="titan-upload", daemon=True)
                self._thread.start()

    def settle(self) -> bool:
        """Wait until the uploads are done or have failed (each request has a time limit), and return True.
        After a signal wait no longer than `exit_seconds`, and return whether they ended in time."""
        with self._lock:
            thread, reported = self._thread, None
        try:
            while thread is not None and thread.is_alive():
                if self._deadline is None and self._leaving():
                    self._deadline = time.monotonic() + self._exit_seconds
                left = SLICE if self._deadline is None else min(SLICE, self._deadline - time.monotonic())
                if left <= 0:
                    leave_threads_behind()
                    return False
                thread.join(left)
                if reported != self.busy and (busy := self.busy) is not None:
                    logger.info("waiting for the upload of %s to %s", busy.name, self._place)
                    reported = busy
        except KeyboardInterrupt:
            leave_threads_behind()
            raise
        return True

    def finish(self) -> bool:
        """Ensure that the newest checkpoints are in the store, and return True. If they are not after
        `exit_seconds` from a signal, log what is missing, and return False.

        Raises:
            TitanError: the second attempt failed too.
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
                else f"after a signal, uploads have {self._exit_seconds:g} seconds to end, see "
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
        """Do something, and return its error, logged; training continues."""
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
        """Return the newest checkpoint that is not in the store. Listings may be outdated, so uploads since
        then count as there."""
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
            if path.exists():  # otherwise it was deleted to keep only newer ones
                raise
            return
        finally:
            self.busy = None
        size = sum(digest.size for digest in manifest.files.values())
        seconds = time.perf_counter() - began
        logger.info("uploaded %s to %s: %s in %.1f s", path.name, self._place, size_text(size), seconds)

    def _here(self) -> list[tuple[Path, Manifest]]:
        """Return the checkpoints that belong in the store, newest first."""
        return self._mine(self._folder)[: self._keep or None]

    def _tidy(self) -> None:
        sweep(self._place, self._run_id)
        if not self._keep:
            return
        here = {path.name for path, _ in self._here()}
        # After a rollback the store has checkpoints of later steps than the run.
        mine = sorted(self._mine(self._place), key=lambda found: found[0].name not in here)
        for path, manifest in mine[self._keep :]:
            self._there.pop(path.name, None)
            discard(path, manifest)

    def _mine(self, folder: Path) -> list[tuple[Path, Manifest]]:
        """Return this run's checkpoints, newest first."""
        return [
            (path, manifest) for path, manifest in steps(folder).items() if manifest.run_id == self._run_id
        ]


def _words(error: Exception) -> str:
    if not isinstance(error, TitanError):
        return f"{type(error).__name__}: {error}"
    return f"{error.message} ({error.hint})" if error.hint else error.message
