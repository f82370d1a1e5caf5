"""Marks: objects in a store that show which process is changing a checkpoint, and what may be incomplete if
it stops. Torch-free.

While `step-N` is uploaded or deleted, `.step-N.tmp-RUN-upload` exists beside it. It holds a line that changes
every few seconds, and the manifest of the checkpoint. A process that does not renew its mark counts as gone.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from titancli.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    hidden_prefix,
    manifest_bytes,
    parse_manifest,
)
from titancli.checkpoint.remote.requests import ABSENT
from titancli.checkpoint.remote.store import RemotePath
from titancli.errors import EnvironmentProblem, TitanError

logger = logging.getLogger(__name__)

RENEWED = 10.0
"""Seconds between two renewals of a mark."""
GONE = 60.0
"""Seconds without a renewal after which the owner of a mark counts as gone."""

_NAME = re.compile(r"\.(step-\d{1,18})\.tmp-[0-9a-f]{8}-upload\Z")


def mark_name(name: str, run_id: str) -> str:
    return f"{hidden_prefix(name, run_id)}upload"


class Mark:
    """A mark of this process, which a thread renews."""

    def __init__(self, path: RemotePath, manifest: Manifest) -> None:
        self._path, self._manifest, self._token = path, manifest_bytes(manifest), secrets.token_hex(8)
        self._ended = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._renew, name="titan-mark", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that no other process has taken over this mark, such as a later attempt of the run.

        Raises:
            TitanError: one has.
        """
        if not self._is_own():
            raise TitanError(
                f"{self._path} is gone, or was replaced: another process is changing these files"
            )

    def remove(self) -> None:
        self._ended.set()
        self._thread.join()
        self._path.unlink()

    def leave(self) -> None:
        """Stop renewing the mark and leave it: the change was not completed."""
        self._ended.set()

    def _is_own(self) -> bool:
        with suppress(*ABSENT):
            return self._path.read_bytes().startswith(self._token.encode())
        return False

    def _write(self) -> None:
        self._path.write_bytes(f"{self._token} {secrets.token_hex(8)}\n".encode() + self._manifest)

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED):
            try:
                if not self._is_own():
                    return  # `check` reports it
                self._write()
            except (TitanError, OSError) as error:  # the upload meets the same failure and reports it
                logger.debug("%s was not renewed: %s", self._path, error)


@contextmanager
def marked(place: RemotePath, manifest: Manifest) -> Iterator[Mark]:
    """Mark `place` as being changed inside the block. If the block fails, the mark stays, to show what may be
    incomplete.

    Raises:
        TitanError: another run is changing it.
    """
    mark = Mark(place.parent / mark_name(place.name, manifest.run_id), manifest)
    try:
        if place.name in of_others(place.parent, manifest.run_id, place.name):
            mark.remove()
            raise TitanError(
                f"{place} is being uploaded by another run", hint="give this run another name (--run-dir)"
            )
        yield mark
    finally:
        mark.leave()
    mark.remove()


def of_others(parent: RemotePath, run_id: str, name: str) -> set[str]:
    """Return `name` if another run is changing this checkpoint at the moment, else nothing. A mark that is
    not renewed within `GONE` is deleted."""
    found = set()
    for path in list(parent.iterdir()):
        match = _NAME.match(path.name)
        if match and match[1] == name and path.name != mark_name(name, run_id):
            if _is_renewed(parent / path.name):
                found.add(match[1])
            else:
                logger.warning("%s was left behind by another run, and is deleted", path)
                path.unlink()
    return found


def _is_renewed(path: RemotePath) -> bool:
    try:
        first, until = path.read_bytes(), time.monotonic() + GONE
        while time.monotonic() < until:
            time.sleep(min(RENEWED, GONE) / 4)
            if path.read_bytes() != first:
                return True
    except ABSENT:  # it has just ended
        pass
    return False


def left_behind(parent: RemotePath, run_id: str) -> Iterator[tuple[RemotePath, Manifest | None]]:
    """Yield the marks that earlier attempts of a run have left, each with its manifest: what may be
    incomplete."""
    for path in list(parent.iterdir()):
        match = _NAME.match(path.name)
        if match and path.name == mark_name(match[1], run_id):
            try:
                text = (parent / path.name).read_bytes().partition(b"\n")[2]
                yield path, parse_manifest(text, cast(Path, parent / match[1] / MANIFEST))
            except ABSENT:
                continue
            except EnvironmentProblem:
                yield path, None
