"""Reading a checkpoint's files, which may come from anywhere, on disks that fail now and then. Torch-free."""

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
"""What a network file system says when it has lost sight of a file, often for a moment only."""

PAUSES = (0.1, 0.5, 2.0)
"""Seconds before each further attempt."""


LOOK = 0.1
"""Seconds between two looks for a file that is waited for."""

_waits: list[float] = []
"""Until when files are waited for. Not for each thread: a file is read by several."""


@contextmanager
def waiting_for_late_files(seconds: float) -> Iterator[None]:
    """Let what is read inside, and is known to have been written by another node, be waited for until so many
    seconds from now have passed: a network disk may show it late."""
    until = time.monotonic() + seconds
    _waits.append(until)
    try:
        yield
    finally:
        _waits.remove(until)


def look_again() -> bool:
    """Return, after a pause, whether something that is not there is still waited for."""
    if time.monotonic() >= max(_waits, default=0.0):
        return False
    time.sleep(LOOK)
    return True


def patiently(read: Callable[[], T]) -> T:
    """Return what `read` returns, calling it again after an error that may pass.

    Raises:
        OSError: of another kind, or one that has not passed.
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
    """Open a regular file for reading and return its descriptor; what is none, as a FIFO, is not waited for.

    Raises:
        OSError: it cannot be opened.
        EnvironmentProblem: it is no regular file.
    """
    try:
        return patiently(lambda: regular(path, os.O_RDONLY))
    except NotRegular as error:
        raise EnvironmentProblem(f"{path} is not a regular file") from error


def read_into(path: Path, start: int, memory: memoryview) -> None:
    """Fill memory with a file's bytes from `start` on; see `read_runs`."""
    read_runs(path, [(start, memory)])


def read_runs(path: Path, runs: Sequence[tuple[int, memoryview]]) -> None:
    """Fill memory with a file's bytes: of each run, those from its start on.

    Raises:
        EnvironmentProblem: it cannot be read, or ends too soon.
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
    """Return a file's size in bytes; None: it is no regular file. A link may lead out of the folder, and who
    opens a FIFO waits for ever."""
    if not isinstance(path, os.PathLike):  # a place in an object store
        return path.stat().st_size
    found = path.lstat()
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_file(path: Path, limit: int) -> bytes:
    """Return a small file's bytes. A place in an object store reads itself.

    Raises:
        OSError: it cannot be read.
        EnvironmentProblem: it is no regular file, or has more than `limit` bytes.
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
            return file.read(size + 1)  # memory for the limit would be allocated at once

    return patiently(read)
