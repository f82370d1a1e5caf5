"""Files that may be compressed (gzip, Zstandard), read as if they were not. Torch-free."""

from __future__ import annotations

import errno
import gzip
import io
import os
import zlib
from typing import Any, BinaryIO, NoReturn, cast

from titancli.errors import EnvironmentProblem
from titancli.files import regular

SUFFIXES = (".gz", ".zst")
BLOCK = 1 << 17
SLICE = 1 << 11
"""Compressed bytes that Zstandard is given at a time: 4 of them can stand for 128 KiB."""
SMALL, FOLD = 1 << 26, 250
"""A file expands to at most `SMALL` bytes, or to `FOLD` times its size if that is more; text does to about 5
times."""
_SKIPPABLE = {bytes((0x50 + number, 0x2A, 0x4D, 0x18)) for number in range(16)}
"""Magic numbers of skippable frames, which a zstd file may begin with."""


RESTORE = "restore it or leave it out, or skip such files: dataset.skip_damaged = true"


class Damaged(EnvironmentProblem):
    """A file whose content cannot be decompressed or decoded."""


def unreadable(path: str, error: OSError) -> NoReturn:
    """Report a file that cannot be read.

    Raises:
        Damaged: it cannot be decompressed.
        EnvironmentProblem: for any other reason.
    """
    damaged = error.errno == errno.EIO
    raise (Damaged if damaged else EnvironmentProblem)(
        f"cannot read the file {path}: {error.strerror or error}",
        hint=RESTORE if damaged else "make it readable, or remove it from the paths of the dataset",
    ) from error


def compression_of(head: bytes) -> str | None:
    """Return the compression of a file by its first bytes, one of `SUFFIXES`; None if it is not
    compressed."""
    if head.startswith(b"\x1f\x8b"):
        return ".gz"
    return ".zst" if head.startswith(b"\x28\xb5\x2f\xfd") or head[:4] in _SKIPPABLE else None


def largest(size: int) -> int:
    """Return the bytes to which a file of `size` bytes may expand."""
    return max(SMALL, FOLD * size)


def too_large(path: str, limit: int) -> OSError:
    """Return the error for a file that expands to more than `limit` bytes."""
    reason = f"it expands to more than {limit:,} bytes; if that is right, decompress it first"
    return OSError(errno.EIO, reason, path)


def is_compressed(path: str) -> bool:
    """Return whether a file is compressed, by its content or, for damaged files, by its suffix.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", opener=regular) as file:
        return compression_of(file.read(4)) is not None or path.endswith(SUFFIXES)


def open_plain(path: str) -> BinaryIO:
    """Open a file for reading its decompressed content; seeking decompresses everything before.

    Raises:
        OSError: the file cannot be read; also raised while reading if it is damaged or truncated.
        EnvironmentProblem: the package that decompresses it is not installed.
    """
    file = open(path, "rb", opener=regular)  # noqa: SIM115 - it is returned
    kind = compression_of(file.peek(4)) or next((end for end in SUFFIXES if path.endswith(end)), None)
    if kind is None:
        return file
    file.close()
    return cast(BinaryIO, io.BufferedReader(_Gzip(path) if kind == ".gz" else _Zstd(path), BLOCK))


class _Gzip(gzip.GzipFile):
    def __init__(self, path: str) -> None:
        super().__init__(path, "rb")
        self._largest = largest(os.fstat(self.fileno()).st_size)

    def read(self, size: int | None = -1) -> bytes:
        try:
            data = super().read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise OSError(errno.EIO, str(error), str(self.name)) from error
        if self.tell() > self._largest:
            raise too_large(str(self.name), self._largest)
        return data


class _Zstd(io.RawIOBase):
    """A reader that detects truncation; the library's own takes it for the end of the data."""

    def __init__(self, path: str) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise EnvironmentProblem(
                f"{path} needs the package zstandard", hint='pip install "titancli[zstd]"'
            ) from error
        self._library, self._path = zstandard, path
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")  # without copies: 2 KiB may stand for 64 MiB, which is read in blocks
        self._at = 0
        self._largest = largest(os.fstat(self._file.fileno()).st_size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input and not (data := self._file.read(SLICE)):
                if self._frame is not None:
                    raise OSError(errno.EIO, "it is truncated", self._path)
                return 0
            self._input = self._input or data
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._library.ZstdError as error:
                raise OSError(errno.EIO, str(error), self._path) from error
            ended = self._frame.eof
            self._input = self._frame.unused_data if ended else b""
            self._frame = None if ended else self._frame
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        self._at += count
        if self._at > self._largest:
            raise too_large(self._path, self._largest)
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = self._at + offset if whence == io.SEEK_CUR else offset
        if whence == io.SEEK_END or target < self._at:
            raise io.UnsupportedOperation("only forward")
        scrap = bytearray(BLOCK)
        while self._at < target and self.readinto(memoryview(scrap)[: target - self._at]):
            pass
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()
