"""Durable writes, and readable errors when a disk refuses. Torch-free."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import xxhash

from titancli.checkpoint.format.hashed import Digest
from titancli.errors import EnvironmentProblem
from titancli.files import out_of_inodes

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, data: bytes) -> Digest:
    """Write a new file and flush it to the disk itself; return its digest."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Digest(len(data), xxhash.xxh3_64(data).hexdigest())


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries, without which a rename may not survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def need(folder: Path, needed: int) -> None:
    """Check that a disk has `needed` bytes free.

    Raises:
        OSError: ENOSPC.
    """
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refusal(error: OSError, path: Path, needed: int, *, kept: str, remedy: str) -> EnvironmentProblem:
    """Return the error for a write of `needed` bytes to `path` that failed: why, what is safe, how to make
    room."""
    about = f"{path} cannot be written: {error.strerror or error}"
    if error.errno == errno.ENOMEM:
        hint = "this machine is out of memory, not of disk: run fewer processes here, or save less at a time"
        return EnvironmentProblem(f"{about}. {kept}", hint=hint)
    if (inodes := out_of_inodes(error, path.parent)) is not None:
        hint = "remove files there, many small ones at best; `df -i` counts them"
        return EnvironmentProblem(f"{about}: {inodes}. {kept}", hint=hint)
    if error.errno in FULL:
        try:
            free = f"{size_text(shutil.disk_usage(path.parent).free)} is free on that disk"
        except OSError:
            free = "the free space is unknown"
        limit = "" if error.errno == errno.ENOSPC else " (a quota or a file size limit is lower)"
        return EnvironmentProblem(
            f"{about}. It needs {size_text(needed)}, and {free}{limit}. {kept}", hint=remedy
        )
    if error.errno == errno.ENOENT:
        hint = "the folder must be on storage that every node can access"
    else:
        hint = f"make {path.parent} writable, or use another folder"
    return EnvironmentProblem(f"{about}. {kept}", hint=hint)


def size_text(size: float) -> str:
    """Return a size in bytes as readable text: `1.5 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
