"""Reading a checkpoint's files, which are untrusted and may lie on unreliable disks. Torch-free."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from titancli.errors import EnvironmentProblem
from titancli.files import NotRegular, regular

T = TypeVar("T")

PASSING = (errno.ESTALE, errno.EIO)
"""Errors of a network file system that has lost sight of a file, often only for a moment."""

PAUSES = (0.1, 0.5, 2.0)
"""Seconds before each further attempt."""


LOOK = 0.1
"""Seconds between two checks for a file that is awaited."""

_waits: list[float] = []
"""Deadlines until which files are awaited. Shared by all threads, since several read one file."""


@contextmanager
def waiting_for_late_files(seconds: float) -> Iterator[None]:
    """Wait up to `seconds` from now for files that another node is known to have written, when they are read
    inside the block: a network disk may show them late."""
    until = time.monotonic() + seconds
    _waits.append(until)
    try:
        yield
    finally:
        _waits.remove(until)


def look_again() -> bool:
    """Pause, and return whether a missing file is still awaited."""
    if time.monotonic() >= max(_waits, default=0.0):
        return False
    time.sleep(LOOK)
    return True


def patiently(read: Callable[[], T]) -> T:
    """Return the result of `read`, retrying after errors that may be temporary.

    Raises:
        OSError: another kind of error, or one that persists.
    """
    pauses = iter(PAUSES)
    while True:
        try:
            return read()
        except FileNotFoundError:
            if not look_again():
                raise
        except OSError as error:
            if error.errno not in PASSING or (pause := next(pauses, None)) is None:
                raise
            time.sleep(pause)


def open_file(path: Path) -> int:
    """Open a regular file for reading and return its descriptor, without blocking on a FIFO.

    Raises:
        OSError: it cannot be opened.
        EnvironmentProblem: it is not a regular file.
    """
    try:
        return patiently(lambda: regular(path, os.O_RDONLY))
    except NotRegular as error:
        raise EnvironmentProblem(f"{path} is not a regular file") from error


def read_into(path: Path, start: int, memory: memoryview) -> None:
    """Fill memory with a file's bytes from `start` on; see `read_runs`."""
    read_runs(path, [(start, memory)])


def read_runs(path: Path, runs: Sequence[tuple[int, memoryview]]) -> None:
    """Fill each memory of `runs` with a file's bytes from its start on.

    Raises:
        EnvironmentProblem: the file cannot be read, or is too short.
    """

    def read() -> None:
        descriptor = open_file(path)
        try:
            for start, memory in runs:
                done = 0
                while done < memory.nbytes:
                    if not (count := os.preadv(descriptor, [memory[done:]], start + done)):
                        raise EnvironmentProblem(f"{path} is damaged: it ends at byte {start + done}")
                    done += count
        finally:
            os.close(descriptor)

    try:
        patiently(read)
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error


def file_size(path: Path) -> int | None:
    """Return a file's size in bytes; None: it is not a regular file. (A link may lead out of the folder, and
    opening a FIFO blocks forever.)"""
    if not isinstance(path, os.PathLike):  # a path in an object store
        return path.stat().st_size
    found = path.lstat()
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a small file, which may be in an object store.

    Raises:
        OSError: it cannot be read.
        EnvironmentProblem: it is not a regular file, or has more than `limit` bytes.
    """
    size = patiently(partial(file_size, path))
    if size is None:
        raise EnvironmentProblem(f"{path} is not a regular file")
    if size > limit:
        raise EnvironmentProblem(f"{path} has {size} bytes, and no more than {limit} are read")
    if not isinstance(path, os.PathLike):
        return path.read_bytes()

    def read() -> bytes:
        with open(open_file(path), "rb") as file:
            return file.read(size + 1)  # reading with the limit as size would allocate all of it at once

    return patiently(read)
