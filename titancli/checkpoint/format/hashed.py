"""Files that are hashed while they are written or read, in a separate thread. Torch-free.

Copying between memory and the page cache keeps a core busy, XXH3 takes a third of one, and the disk none.
They run at the same time, so a checksum costs next to nothing on two cores.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from titancli.checkpoint.format.files import open_file, patiently
from titancli.errors import EnvironmentProblem

BLOCK = 1 << 22
"""Bytes written by one system call."""

_READ = 1 << 24
"""Bytes read by one call: two threads read at once, and with smaller blocks they wait for each other."""

_SEND = 1 << 26
"""Bytes sent to the disk at once: many small parts cost the kernel more than they gain."""

_BEHIND = 1 << 26
"""Bytes that the hash may lag behind the writes, which is also the memory kept for it."""

PIECE = 1 << 20
"""Bytes of a tensor that have a separate checksum, so that a rank reads little more than it needs."""

_APART = 1 << 16
"""Below this many bytes, hashing at once is faster than waking another thread."""


@dataclass(frozen=True)
class Digest:
    """The size and checksum that identify a file's contents."""

    size: int
    """Size in bytes."""
    xxh3_64: str
    """XXH3 as 16 lower-case hexadecimal digits."""


class Pieces:
    """XXH3 of each `PIECE` bytes of one tensor while it is written to a file."""

    def __init__(self) -> None:
        self._states: list[xxhash.xxh3_64] = []
        self._size = 0

    def cut(self, view: memoryview) -> Iterator[tuple[memoryview, xxhash.xxh3_64]]:
        """Yield the tensor's next bytes in parts, each with the hash that it belongs to."""
        while view:
            room = PIECE - self._size % PIECE
            if room == PIECE:
                self._states.append(xxhash.xxh3_64())
            part, view = view[:room], view[room:]
            self._size += part.nbytes
            yield part, self._states[-1]

    def hexdigests(self) -> tuple[str, ...]:
        """Return the checksums, once the file is finished."""
        return tuple(state.hexdigest() for state in self._states)


class _Hash:
    """XXH3 of a stream. Blocks must stay unchanged until `settle` returns."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="titan-hash")
        self._pending: deque[Future[None]] = deque()

    def update(
        self,
        block: memoryview,
        ready: Future[None] | None = None,
        piece: xxhash.xxh3_64 | None = None,
    ) -> None:
        """Append a block to the hash, and to that of a piece if given, once its bytes are ready."""
        if block.nbytes < _APART and ready is None and not self._pending:
            self._add(block, None, piece)
        else:
            self._pending.append(self._thread.submit(self._add, block, ready, piece))

    def settle(self) -> None:
        """Wait until everything is hashed; raise what failed while the bytes were fetched."""
        while self._pending:
            self._pending.popleft().result()

    def hexdigest(self) -> str:
        self.settle()
        return self._state.hexdigest()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _add(self, block: memoryview, ready: Future[None] | None, piece: xxhash.xxh3_64 | None) -> None:
        if ready is not None:
            ready.result()
        self._state.update(block)
        if piece is not None:
            piece.update(block)


class HashedWriter:
    """Writes a new file. A context manager.

    Raises:
        OSError: the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (this is the context manager)
        self._hash = _Hash()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="titan-disk")
        self._sending: Future[None] | None = None
        self._sent = self._settled = 0
        self.size = 0
        """Bytes written so far."""

    def write(self, data: bytes | memoryview, pieces: Pieces | None = None) -> None:
        """Append bytes, which are the next ones of `pieces` if given. They must stay unchanged until `settle`
        or `finish` has returned."""
        view = memoryview(data).cast("B")
        if self.size - self._settled > _BEHIND:
            self.settle()
        if pieces is None:
            self._hash.update(view)
        else:
            for part, piece in pieces.cut(view):
                self._hash.update(part, piece=piece)
        while view:
            written = self._file.write(view[:BLOCK])
            self.size += written
            view = view[written:]
            self._send()

    def settle(self) -> None:
        """Wait until everything written is hashed."""
        self._hash.settle()
        self._settled = self.size

    def finish(self) -> Digest:
        """Flush the file to the disk itself, and return its digest."""
        os.fsync(self._file.fileno())
        return Digest(self.size, self._hash.hexdigest())

    def close(self) -> None:
        """Close the file, finished or not."""
        self._hash.close()
        self._disk.shutdown()
        self._file.close()

    def _send(self) -> None:
        """Start writing back what is written so far while more is written, so that `finish` waits less.

        The kernel alone would start when a tenth of the memory is dirty. The call blocks while the disk's
        queue is full, so it has a thread of its own.
        """
        if self.size - self._sent >= _SEND and (self._sending is None or self._sending.done()):
            start, self._sent = self._sent, self.size
            self._sending = self._disk.submit(_start_writeback, self._file.fileno(), start, self.size - start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HashedReader:
    """Reads a file from beginning to end, two blocks at a time. A context manager.

    Raises:
        EnvironmentProblem: it cannot be read, or is too short. It may be raised later, by `settle`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open_file(path)
        except OSError as error:
            raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error
        self.size = os.fstat(self._file).st_size
        self.position = 0
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="titan-read")
        self._hash = _Hash()

    def readinto(self, memory: memoryview) -> None:
        """Fill memory with the next bytes. They are there, and may be changed, once `settle` has returned."""
        view = memory.cast("B")
        while view:
            block, view = view[:_READ], view[_READ:]
            if block.nbytes < _APART:
                self._fill(block, self.position)
                self._hash.update(block)
            else:
                self._hash.update(block, self._readers.submit(self._fill, block, self.position))
            self.position += block.nbytes

    def skip(self, count: int, scratch: memoryview) -> None:
        """Hash the next bytes without keeping them; `scratch` is overwritten."""
        while count:
            self.settle()
            part = scratch[: min(count, scratch.nbytes)]
            self.readinto(part)
            count -= part.nbytes

    def settle(self) -> None:
        """Wait until all requested bytes are read and hashed."""
        self._hash.settle()

    def digest(self) -> Digest:
        """Return the digest of what was read so far."""
        return Digest(self.position, self._hash.hexdigest())

    def _fill(self, block: memoryview, position: int) -> None:
        while block:
            try:
                count = patiently(partial(os.preadv, self._file, [block], position))
            except OSError as error:
                raise EnvironmentProblem(f"{self._path} cannot be read: {error.strerror}") from error
            if not count:
                raise EnvironmentProblem(f"{self._path} is damaged: it ends at byte {position}")
            block, position = block[count:], position + count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._hash.close()
        os.close(self._file)


def checksum(memory: memoryview | bytes) -> str:
    """Return the XXH3 of bytes; releases the GIL."""
    state = xxhash.xxh3_64()
    state.update(memory)
    return state.hexdigest()


def file_digest(path: Path) -> Digest:
    """Read a whole file, and return its size and checksum.

    Raises:
        EnvironmentProblem: it cannot be read.
    """
    with HashedReader(path) as file:
        file.skip(file.size, memoryview(bytearray(min(file.size, 4 * BLOCK))))
        return file.digest()


def _find_writeback() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's `sync_file_range`, which Python does not offer; None on other systems."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_writeback = _find_writeback()
_WRITE = 2  # SYNC_FILE_RANGE_WRITE


def _start_writeback(file: int, start: int, count: int) -> None:
    """Start writing part of a file to the disk. Errors are reported by the fsync that follows."""
    if _writeback is not None:
        _writeback(file, start, count, _WRITE)
