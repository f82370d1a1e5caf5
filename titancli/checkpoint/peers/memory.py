"""A run's folder in a node's memory, and the file of the run that says which copy counts. Torch-free.

/dev/shm/titan-RUN_ID/      held by each rank that uses it
    run                     a link to the run folder
    step-40/                files of a checkpoint: those of this node's ranks and of the node's before it
    loading/step-40/        what a resume reads: links to these, and what has been sent by other nodes
    .step-60.tmp-…/         a copy under way
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
"""In `RUN/checkpoints`: which copy counts."""
RECORD_LIMIT = 1 << 16
KEPT = 2
"""Copies that lie in memory at once: the one that counts, and the one under way."""
FORGOTTEN = 3600.0
"""Seconds after which the copies of another run that nobody holds are deleted."""
CGROUPS = Path("/sys/fs/cgroup")
_NAME = re.compile(r"titan-[0-9a-f]{32}\Z")


@dataclass(frozen=True)
class Copy:
    """A copy that is complete on all nodes, as the run folder names it."""

    step: int
    identity: str
    """Checksum of its manifest."""
    serial: int
    """Of the newest checkpoint on the disk when it was made: one that was saved later is newer."""
    attempt: int
    """The attempt that has made it, counted from 1."""


class Memory:
    """A run's folder in this node's memory.

    Raises:
        EnvironmentProblem: it cannot be made, or is somebody else's.
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
                raise EnvironmentProblem(f"{self.folder} on {socket.gethostname()} belongs to somebody else")
            self._held = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(self._held, fcntl.LOCK_SH)
            with contextlib.suppress(FileExistsError):
                (self.folder / "run").symlink_to(run)
        except OSError as error:
            raise self.refusal(error) from error
        boot = Path("/proc/sys/kernel/random/boot_id")
        machine = boot.read_text() if boot.is_file() else socket.gethostname()
        self.identity = f"{machine.strip()} {found.st_dev} {found.st_ino}"
        """Equal for ranks that share this memory."""

    def refusal(self, error: OSError) -> EnvironmentProblem:
        """An error of the operating system, in words."""
        return EnvironmentProblem(
            f"{self.folder} on {socket.gethostname()} cannot be written: {error.strerror or error}",
            hint="set checkpoint.peer_folder to a folder in memory that is writable on every node, or "
            "checkpoint.peer_interval=0",
        )

    def need(self, needed: int) -> None:
        """Ensure that there is room for `needed` bytes.

        Raises:
            EnvironmentProblem: there is not.
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
                "checkpoint.peer_folder to another folder in memory, or checkpoint.peer_interval=0",
            )

    def used(self) -> int:
        """Return the bytes of its files, each once."""
        found = (path.lstat() for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return sum({(file.st_ino): file.st_blocks * 512 for file in found}.values())

    def held(self, copy: Copy) -> tuple[dict[str, int], list[str]]:
        """Return the files of a copy that this node has, with their sizes, and what is wrong with others.

        Those that describe it, the manifest among them, are there all or none. All but the data are verified;
        these are by who reads them.
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
        """Delete everything but the copy of a step; what cannot be deleted stays."""
        with contextlib.suppress(FileNotFoundError):  # others may have emptied the memory
            for path in list(self.folder.iterdir()):
                if path.name not in ("run", f"step-{keep}"):
                    shutil.rmtree(path, ignore_errors=True)

    def sweep(self) -> None:
        """Delete what other runs of this user have left: those whose folder is gone, or an hour old."""
        for path in self._root.iterdir():
            with contextlib.suppress(OSError):
                if _NAME.match(path.name) and path != self.folder and _is_forgotten(path):
                    shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Let go of the folder, which stays."""
        os.close(self._held)


def description(manifest: Manifest) -> list[str]:
    """Return the files that say what the data are, which every node has: all but data and their places."""
    return [name for name in manifest.files if not (FILE_NAME.match(name) or PART_NAME.match(name))]


def identity_of(manifest: bytes) -> str:
    return xxhash.xxh3_128(manifest).hexdigest()


def _size(path: Path) -> int | None:
    try:
        return file_size(path)
    except FileNotFoundError:
        return None


def _is_forgotten(folder: Path) -> bool:
    """Whether nobody holds another run's folder, and nobody will come back for it."""
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
    """Whether a folder lies in a tmpfs."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    places = {path: kind for _, path, kind, *_ in mounts}
    return next((places[str(p)] for p in (folder, *folder.parents) if str(p) in places), "") == "tmpfs"


def _available() -> int:
    """Bytes of memory that are free, or would be at once: of the machine, and of the cgroups (version 2) that
    this process is in; where a container has no more, it is killed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    group = CGROUPS / next((line[3:].strip("/") for line in groups if line.startswith("0::")), "")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # no limit is the word "max"
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
            free.append(max(0, limit - used + cached))
    return min(free)


# ---------------------------------------------------------------------------------- which copy counts


def read_record(checkpoints: Path) -> Copy | None:
    """Return the copy that counts, as far as the run folder knows; None where there is none."""
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
    """Have no copy count any longer."""
    try:
        (checkpoints / RECORD).unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"{checkpoints / RECORD} cannot be deleted: {error.strerror}") from error


def outdated(checkpoints: Path, copy: Copy) -> str | None:
    """Return why a copy is not what a run continues from, as the end of a sentence; None: it is the newest
    state, or that of the newest checkpoint."""
    if copy.serial == last_serial(checkpoints):
        return None
    newest = next(iter(steps(checkpoints).values()), None)
    if newest is not None and newest.step == copy.step and newest.serial == copy.serial + 1:
        return None
    return "checkpoints were saved or removed after it"
