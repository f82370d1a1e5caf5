"""A run's folder in a node's memory, and the file in the run folder that records the valid copy. Torch-free.

/dev/shm/titan-RUN_ID/      locked by each rank that uses it
    run                     a link to the run folder
    step-40/                files of a checkpoint: of the ranks of this node and of the previous one
    loading/step-40/        what a resume reads: links to these, and files from other nodes
    .step-60.tmp-…/         a copy that is being written
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import xxhash

from titancli.checkpoint.format.disk import size_text
from titancli.checkpoint.format.files import file_size, read_file
from titancli.checkpoint.format.hashed import file_digest
from titancli.checkpoint.format.layout import FILE_NAME
from titancli.checkpoint.format.manifest import MANIFEST, Manifest, last_serial, read_manifest, steps
from titancli.checkpoint.format.metadata import PART_NAME
from titancli.errors import EnvironmentProblem
from titancli.runs import write_atomically

RECORD = "peers.json"
"""The file in `RUN/checkpoints` that records the valid copy."""
RECORD_LIMIT = 1 << 16
FORGOTTEN = 3600.0
"""Seconds after which another run's copies are deleted if no process has them locked."""
CGROUPS = Path("/sys/fs/cgroup")
_NAME = re.compile(r"titan-[0-9a-f]{32}\Z")


@dataclass(frozen=True)
class Copy:
    """A copy that is complete on all nodes, as recorded in the run folder."""

    step: int
    identity: str
    """Checksum of its manifest."""
    serial: int
    """The serial number of the newest checkpoint on the disk when the copy was made; later checkpoints have
    larger ones."""
    attempt: int
    """The attempt that made it, counted from 1."""


class Memory:
    """A run's folder in this node's memory.

    Raises:
        EnvironmentProblem: it cannot be created, or belongs to another user.
    """

    def __init__(self, root: Path, run_id: str, run: Path) -> None:
        self.folder = root / f"titan-{run_id}"
        self.loading = self.folder / "loading"
        self._root = root
        try:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            found = self.folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise EnvironmentProblem(f"{self.folder} on {socket.gethostname()} belongs to another user")
            self._held = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(self._held, fcntl.LOCK_SH)
            with contextlib.suppress(FileExistsError):
                (self.folder / "run").symlink_to(run)
        except OSError as error:
            raise self.refusal(error) from error
        boot = Path("/proc/sys/kernel/random/boot_id")
        machine = boot.read_text() if boot.is_file() else socket.gethostname()
        self.identity = f"{machine.strip()} {found.st_dev} {found.st_ino}"
        """A value that is equal on ranks that share this memory."""

    def refusal(self, error: OSError) -> EnvironmentProblem:
        """Return the error for an operation that the operating system refused."""
        return EnvironmentProblem(
            f"{self.folder} on {socket.gethostname()} cannot be written: {error.strerror or error}",
            hint="set checkpoint.copies.folder to a folder in memory that is writable on every node, or "
            "remove checkpoint.copies",
        )

    def need(self, needed: int) -> None:
        """Ensure that there is room for `needed` bytes.

        Raises:
            EnvironmentProblem: there is too little.
        """
        try:
            free = shutil.disk_usage(self._root).free
        except OSError as error:
            raise self.refusal(error) from error
        if _is_memory(self._root):
            free = min(free, _available())
        if free < needed:
            raise EnvironmentProblem(
                f"copies of the state need {size_text(needed)} in {self._root} on {socket.gethostname()}, "
                f"where {size_text(free)} is free",
                hint="make it larger (in a container, for instance docker run --shm-size), set "
                "checkpoint.copies.folder to another folder in memory, or remove checkpoint.copies",
            )

    def used(self) -> int:
        """Return the total bytes of its files; each hard-linked file counts once."""
        found = (path.lstat() for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return sum({(file.st_ino): file.st_blocks * 512 for file in found}.values())

    def held(self, copy: Copy) -> tuple[dict[str, int], list[str]]:
        """Return the files of a copy that this node has, with their sizes, and what is wrong with the others.

        The files that describe the copy, including the manifest, are returned only if all are good. Data
        files are verified when they are read, not here.
        """
        folder = self.folder / f"step-{copy.step}"
        if not folder.is_dir():
            return {}, []
        try:
            manifest = read_manifest(folder)
            if identity_of((folder / MANIFEST).read_bytes()) != copy.identity:
                return {}, [f"{folder} is another copy"]
            present = {n: d for n, d in manifest.files.items() if _size(folder / n) == d.size}
            damaged = {
                name
                for name, digest in present.items()
                if not FILE_NAME.match(name) and file_digest(folder / name) != digest
            }
            wrong = [f"{name} is damaged: its checksum does not match" for name in sorted(damaged)]
            held = {name: digest.size for name, digest in present.items() if name not in damaged}
            if any(name not in held for name in description(manifest)):
                return {}, wrong or [f"{folder} is not complete"]
            return {**held, MANIFEST: (folder / MANIFEST).stat().st_size}, wrong
        except EnvironmentProblem as error:
            return {}, [error.message]
        except OSError as error:
            return {}, [f"{folder} cannot be read: {error.strerror}"]

    def tidy(self, keep: int | None) -> None:
        """Delete everything but the copy of a step; errors are ignored."""
        with contextlib.suppress(FileNotFoundError):  # others may have emptied the memory
            for path in list(self.folder.iterdir()):
                if path.name not in ("run", f"step-{keep}"):
                    shutil.rmtree(path, ignore_errors=True)

    def sweep(self) -> None:
        """Delete copies of this user's other runs that are unlocked, and whose run folder is gone or an hour
        has passed."""
        for path in self._root.iterdir():
            with contextlib.suppress(OSError):
                if _NAME.match(path.name) and path != self.folder and _is_forgotten(path):
                    shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Unlock the folder; it stays."""
        os.close(self._held)


def description(manifest: Manifest) -> list[str]:
    """Return the files that every node has: all but data files and the parts of the metadata."""
    return [name for name in manifest.files if not (FILE_NAME.match(name) or PART_NAME.match(name))]


def identity_of(manifest: bytes) -> str:
    return xxhash.xxh3_128(manifest).hexdigest()


def _size(path: Path) -> int | None:
    try:
        return file_size(path)
    except FileNotFoundError:
        return None


def _is_forgotten(folder: Path) -> bool:
    """Return whether another run's folder is unlocked and no longer needed."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    run = folder / "run"
    return (run.is_symlink() and not run.exists()) or time.time() - found.st_mtime > FORGOTTEN


def _is_memory(folder: Path) -> bool:
    """Return whether a folder lies in a tmpfs."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    places = {path: kind for _, path, kind, *_ in mounts}
    return next((places[str(p)] for p in (folder, *folder.parents) if str(p) in places), "") == "tmpfs"


def _available() -> int:
    """Return the bytes of memory that are free or can be freed at once, on the machine and within the limits
    of this process's cgroups (version 2), beyond which a container is killed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    group = CGROUPS / next((line[3:].strip("/") for line in groups if line.startswith("0::")), "")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # "max": there is no limit
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
            free.append(max(0, limit - used + cached))
    return min(free)


# ---------------------------------------------------------------------------------- the valid copy


def read_record(checkpoints: Path) -> Copy | None:
    """Return the copy that the run folder records; None: there is none."""
    try:
        copy = Copy(**json.loads(read_file(checkpoints / RECORD, RECORD_LIMIT)))
        if [type(value) for value in astuple(copy)] != [int, str, int, int]:
            raise ValueError("it is malformed")
        return copy
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise EnvironmentProblem(
            f"{checkpoints / RECORD} cannot be read: {error}",
            hint="delete it, to continue from the newest checkpoint on the disk",
        ) from error


def write_record(checkpoints: Path, copy: Copy) -> None:
    write_atomically(checkpoints / RECORD, json.dumps(asdict(copy)))


def forget(checkpoints: Path) -> None:
    """Delete the record of the valid copy."""
    try:
        (checkpoints / RECORD).unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"{checkpoints / RECORD} cannot be deleted: {error.strerror}") from error


def outdated(checkpoints: Path, copy: Copy) -> str | None:
    """Return why a run does not continue from a copy, as the end of a sentence; None: the copy is the run's
    newest state, or equals its newest checkpoint."""
    if copy.serial == last_serial(checkpoints):
        return None
    newest = next(iter(steps(checkpoints).values()), None)
    if newest is not None and newest.step == copy.step and newest.serial == copy.serial + 1:
        return None
    return "checkpoints were saved or removed after it"
