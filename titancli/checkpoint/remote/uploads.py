"""Checkpoints on their way to an object store while training goes on: `checkpoint.remote`. Torch-free."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import cast

from titancli.checkpoint.format.disk import size_text
from titancli.checkpoint.format.manifest import STEP_NAME, Manifest, is_checkpoint, steps
from titancli.checkpoint.remote.store import RemotePath
from titancli.checkpoint.remote.transfer import mark_name, of_others, upload
from titancli.errors import TitanError

logger = logging.getLogger(__name__)


class Uploads:
    """Keeps a run's checkpoints in a store as they are in its folder; for one rank.

    `wake` when one was saved: a thread then puts what is missing there, the newest first, and after that
    deletes all but the newest `keep` of this run. What fails is told at once, and tried again with the next.
    """

    def __init__(self, folder: Path, place: Path, run_id: str, keep: int) -> None:
        self._folder, self._place, self._run_id, self._keep = folder, place, run_id, keep
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False
        self._error: Exception | None = None
        self.busy: Path | None = None
        """The checkpoint under way; it must stay where it is."""

    def wake(self) -> None:
        """There is something new. Returns at once."""
        with self._lock:
            self._again = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="titan-upload", daemon=True)
                self._thread.start()

    def settle(self) -> None:
        """Wait until what was asked for is done, or has failed: each request to the store has its limit."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def finish(self) -> None:
        """See to it that the newest checkpoints are there, waiting as long as it takes.

        Raises:
            TitanError: they are not, at the second attempt; or the store takes nothing any more.
        """
        if self.busy is not None:
            logger.info("waiting for the upload of %s to %s", self.busy.name, self._place)
        self.settle()
        for _ in range(2):
            if self._thread is None:
                self.wake()
                self.settle()
            if self._error is None:
                break
        if self._error is not None:
            raise TitanError(
                f"the run has ended, but not all of its checkpoints in {self._folder} were uploaded to "
                f"{self._place}: "
                f"{_words(self._error)}",
                hint="copy them there with the store's own tools, the manifest.json of each last",
            ) from self._error

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            try:
                while (path := self._missing()) is not None:
                    self._upload(path)
                self._sweep()
                self._purge()
                self._error = None
            except Exception as error:  # of whatever kind: training goes on
                self._error = error
                logger.warning(
                    "a checkpoint was not uploaded; the next save tries again: %s",
                    _words(error),
                    exc_info=logger.isEnabledFor(logging.DEBUG),
                )

    def _missing(self) -> Path | None:
        there = {path.name: manifest for path, manifest in steps(self._place).items()}
        here = self._mine(self._folder)[: self._keep or None]
        return next((path for path, manifest in here if there.get(path.name) != manifest), None)

    def _upload(self, path: Path) -> None:
        began = time.perf_counter()
        self.busy = path
        try:
            upload(path, self._place / path.name)
        except FileNotFoundError:
            if path.exists():  # else it has made way for newer ones
                raise
            return
        finally:
            self.busy = None
        size = sum(file.stat().st_size for file in path.iterdir()) if path.exists() else 0
        seconds = time.perf_counter() - began
        logger.info("uploaded %s to %s: %s in %.1f s", path.name, self._place, size_text(size), seconds)

    def _sweep(self) -> None:
        """Delete what uploads that were cut off have left: what is to be there has its manifest by now."""
        place = cast(RemotePath, self._place)
        others = of_others(place, self._run_id)
        for path in list(place.iterdir()):
            if STEP_NAME.match(path.name) and path.name not in others and not is_checkpoint(cast(Path, path)):
                path.delete()
            elif path.name == mark_name(path.name[1:].partition(".")[0], self._run_id):
                path.unlink()

    def _purge(self) -> None:
        if not self._keep:
            return
        here = {path.name for path, _ in self._mine(self._folder)[: self._keep]}
        # A run that went back has fewer saves behind it than what it left in the store.
        mine = sorted(self._mine(self._place), key=lambda found: found[0].name not in here)
        for path, _ in mine[self._keep :]:
            cast(RemotePath, path).delete()

    def _mine(self, folder: Path) -> list[tuple[Path, Manifest]]:
        """This run's checkpoints, the newest first."""
        return [
            (path, manifest) for path, manifest in steps(folder).items() if manifest.run_id == self._run_id
        ]


def _words(error: Exception) -> str:
    if not isinstance(error, TitanError):
        return f"{type(error).__name__}: {error}"
    return f"{error.message} ({error.hint})" if error.hint else error.message
