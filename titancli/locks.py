"""Lock files: held by a process until it ends, whichever way, and naming it for others.

Imports no torch.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from titancli.errors import EnvironmentProblem
from titancli.files import read_bytes, regular

logger = logging.getLogger(__name__)

TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
"""Errors of `flock` if another process holds the lock."""


def _take(file: IO[Any], kind: int) -> None:
    """Lock an open file. `is_locked` holds it for a moment, so a first refusal is not the last word.

    Raises:
        OSError: it is held, or cannot be locked at all.
    """
    for waits in (0.01, 0.05, None):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if waits is None or error.errno not in TAKEN:
                raise
            time.sleep(waits)
        else:
            return


def is_locked(path: Path, kind: int) -> bool | None:
    """Return whether a process holds a lock file; None if this cannot be determined. Changes no file."""
    try:
        # NFS locks a file alone only for who may write it.
        with open(path, "r+b" if os.access(path, os.W_OK) else "rb", opener=regular) as file:
            try:
                _take(file, kind)
            except OSError as error:
                return True if error.errno in TAKEN else None
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


IN_USE = "wait for that process or stop it, or start a new run in another folder"


def holder(path: Path) -> str:
    """Return the holder of a lock file, as recorded in it."""
    try:
        words = read_bytes(path, 1 << 20).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        words = []
    return words[-1] if words else "another process"


def locked(path: Path, kind: int, what: str) -> IO[str]:
    """Open and lock a file, and write into it who holds it. `what` it stands for is named in errors.

    Raises:
        EnvironmentProblem: another process holds it, or it cannot be written.
    """
    try:
        file = open(path, "a+", encoding="utf-8", opener=regular)  # noqa: SIM115 - held until the process ends
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}") from error
    try:
        _take(file, kind)
    except OSError as error:
        if error.errno in TAKEN:
            file.close()
            raise EnvironmentProblem(f"{what} is in use by {holder(path)}", hint=IN_USE) from error
        logger.warning(
            "%s cannot be locked (%s): another run could write to it at the same time", path, error
        )
    if kind == fcntl.LOCK_EX:
        file.truncate(0)
    try:
        os.write(file.fileno(), f"process {os.getpid()} on host {socket.gethostname()}\n".encode())
    except OSError as error:
        file.close()
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}", hint="free some space") from error
    return file


class Hold:
    """A lock file held by this process, until `release` or the process's end."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def release(self) -> None:
        self._file.close()


def hold_file(path: Path, what: str) -> Hold:
    """Hold a lock file alone. `what` it stands for is named in errors.

    Raises:
        EnvironmentProblem: another process holds it, or it cannot be written.
    """
    return Hold(locked(path, fcntl.LOCK_EX, what))
