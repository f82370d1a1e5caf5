"""Files in a folder that anybody may have written to: only regular ones are opened, no link is written
through, and JSON is read with limits. Torch-free."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from titancli.errors import EnvironmentProblem, causes

T = TypeVar("T")

LARGEST = 1 << 28
"""Bytes of a file that is read at once."""


class NotRegular(OSError):
    """Something else than a regular file: a FIFO, on which who opens it waits, a device, or a link that would
    be written through."""


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file and return its descriptor: an opener for `open`.

    Raises:
        NotRegular: it is none, or it is a link and is opened for writing.
        OSError: it cannot be opened.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        descriptor = os.open(
            path, flags | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if writes else 0), 0o666
        )
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise NotRegular(
                errno.ELOOP, "it is a link, and no link is written through", str(path)
            ) from error
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads
            raise NotRegular(errno.ENXIO, "it is not a regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_bytes(path: Path, limit: int = LARGEST) -> bytes:
    """Return a file's bytes.

    Raises:
        OSError: it cannot be read, or is larger.
    """
    with open(path, "rb", opener=regular) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and no more than {limit} are read", str(path))
        return file.read(limit)


def out_of_inodes(error: OSError, folder: Path | str) -> str | None:
    """Return that a disk refuses because it has as many files as it can have, and how many these are; None if
    that is not why an error was raised."""
    if error.errno != errno.ENOSPC:
        return None
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    if disk.f_favail or not disk.f_files:  # some file systems have no fixed number
        return None
    return f"all {disk.f_files:,} inodes of that disk are in use, so it takes no further file"


def json_text(value: Any, indent: int | None = None) -> str:
    """Return plain data as JSON that a UTF-8 file can hold: readable, and with escapes for the surrogates of
    a path or argument that is not UTF-8."""
    return utf8(json.dumps(value, indent=indent, ensure_ascii=False))  # JSON has the same escape


def utf8(value: T) -> T:
    """Return plain data whose texts UTF-8 can hold: a surrogate, as in a path that is not UTF-8, becomes the
    escape that Python shows, such as `\\udcff`."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()  # type: ignore[return-value]
    if isinstance(value, dict):
        return {utf8(key): utf8(item) for key, item in value.items()}  # type: ignore[return-value]
    return [utf8(item) for item in value] if isinstance(value, list) else value  # type: ignore[return-value]


FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
"""What a cell begins with that a spreadsheet may take for a formula."""


def csv_text(text: str) -> str:
    """Return a text as a cell of CSV in which a spreadsheet computes nothing: one that begins as a formula
    gets a `'` before it. Different texts stay different. Numbers need no such care."""
    return f"'{text}" if text.lstrip("' ").startswith(FORMULA) else text


def encoded(path: Path, text: str) -> bytes:
    """Return a text as UTF-8, for a file.

    Raises:
        EnvironmentProblem: it holds a surrogate.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.end + 20]
        raise EnvironmentProblem(
            f"cannot write {path}: {near!a} is not valid UTF-8",
            hint="rename the file or folder, or correct the argument, that this text comes from",
        ) from error


def parse_json(data: bytes | str) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path, limit: int = LARGEST) -> Any:
    """Return what a file says.

    Raises:
        OSError: it cannot be read, or is larger than `limit` bytes.
        ValueError: it is not JSON.
    """
    return parse_json(read_bytes(path, limit))


def denied(error: BaseException | None) -> str | None:
    """Return whose the file or folder is that the system denies, and what to do; None where neither an error
    nor what caused it is of this kind."""
    of_this_kind = (
        cause
        for cause in causes(error)
        if isinstance(cause, OSError) and cause.filename and cause.errno in _DENIED
    )
    if (error := next(of_this_kind, None)) is None:
        return None
    path = Path(os.fsdecode(error.filename)).absolute()
    if error.errno == errno.EROFS:
        return "the file system there can only be read: name another place"
    above = [folder for folder in reversed(path.parents) if os.path.isdir(folder)]
    closed = [folder for folder in above if not os.access(folder, os.X_OK)]
    there = [place for place in (path, *path.parents) if os.path.lexists(place)]
    place = (closed or there)[0]
    if os.access(place, os.R_OK | os.W_OK):  # to remove or replace something is up to its folder
        place = place.parent
    try:
        found = place.stat()
    except OSError:
        return None
    about = f"{place} ({stat.filemode(found.st_mode)}) belongs to {_user(found.st_uid)}"
    if found.st_uid == os.geteuid():
        return f"{about}, who runs this: chmod u+rwX {quote(str(place))}"
    return f"{about}, and {_user(os.geteuid())} runs this: name another place, or ask for access"


_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def _user(number: int) -> str:
    import pwd  # only an error needs it

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # as in many containers
        return f"user {number}"
