"""Token shards in an object store: read by ranges, each cached on this machine.

Stores are accessed through fsspec. A cached shard file is as long as in the store, with holes; beside it are
the checksums of its cached blocks, which each process verifies once.
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import xxhash

from titancli.data.shards import INDEX, INDEX_BYTES, Index, eviction, read_index, wrong_size
from titancli.data.shards.reader import OpenFiles
from titancli.errors import EnvironmentProblem
from titancli.fingerprint import ChunkSums, FullCheck, cache_folder, first_difference, full_check
from titancli.object_store import file_system

logger = logging.getLogger(__name__)

BLOCK = 1 << 21
"""Bytes per request."""
SUM_BYTES = 8
EVERY = 32
"""Blocks after which a process checks the cache's limit."""


@dataclass
class _Object:
    """A file in a store."""

    store: Any
    key: str
    url: str
    size: int
    sound: bytearray
    """For each block, whether this process has found it in the cache since opening the file."""


class RemoteFiles(OpenFiles):
    """Cached files that are filled as they are read; other files are read directly."""

    def __init__(self) -> None:
        super().__init__()
        self._objects: dict[str, _Object] = {}
        self._limit, self._blocks, self._warned = eviction.limit(), EVERY, False

    def index(self, url: str) -> Index:
        """Return the index of token shards in a store; their files are then read through its cache folder.

        Raises:
            EnvironmentProblem: the store cannot be reached, or its files do not have the sizes of the index.
        """
        store, key = file_system(url)
        try:
            if (store.info(f"{key}/{INDEX}").get("size") or 0) > INDEX_BYTES:
                raise EnvironmentProblem(
                    f"{url}/{INDEX} has more than {INDEX_BYTES:,} bytes: it is not an index",
                    hint="name a folder that `titan data tokenize` wrote",
                )
            text = store.cat_file(f"{key}/{INDEX}")
            folder = cache_folder() / "shards" / xxhash.xxh3_128_hexdigest(url.encode() + b"\0" + text)
            if not (folder / INDEX).is_file():
                folder.mkdir(parents=True, exist_ok=True)
                part = folder / f"{INDEX}.{os.getpid()}"
                part.write_bytes(text)
                os.replace(part, folder / INDEX)
            index = read_index(folder)
            sizes = {
                row["name"].rstrip("/").rpartition("/")[2]: row.get("size")
                for row in store.ls(key, detail=True)
            }
            for shard in index.shards:
                for (path, size), sums in zip(index.files(shard), shard.sums, strict=True):
                    there = sizes.get(path.name)
                    there = store.info(f"{key}/{path.name}")["size"] if there is None else there
                    if there != size:
                        raise EnvironmentProblem(
                            f"token shards: {wrong_size(f'{url}/{path.name}', size, there)}",
                            hint="upload the folder again",
                        )
                    blocks = bytearray(-(-size // BLOCK))
                    found = _Object(store, f"{key}/{path.name}", f"{url}/{path.name}", size, blocks)
                    self._objects[str(path)] = found
                    if (check := full_check()) is not None:
                        self._verify(found, sums, check)
        except EnvironmentProblem:
            raise
        except Exception as error:  # each store has its own exceptions
            _failed(url, error)
        return index

    def _verify(self, found: _Object, sums: str, check: FullCheck) -> None:
        """Read a whole object, bypassing the cache.

        Raises:
            EnvironmentProblem: it does not match the index.
        """
        there = ChunkSums()
        for first in range(0, found.size, BLOCK):
            data = self._read(found, first, min(BLOCK, found.size - first))
            there.update(data)
            check.count(found.url, len(data))
        if there.all != sums:
            byte = first_difference(sums, there.all)
            raise EnvironmentProblem(
                f"token shards: {found.url}: the data differ from {INDEX} from byte {byte:,} on",
                hint="upload the folder again",
            )

    def ready(self, path: str, byte: int, size: int) -> None:
        """Ensure that these bytes are in the file.

        Raises:
            EnvironmentProblem: the store cannot be reached, or the cache cannot be written.
        """
        found = self._objects.get(path)
        if not size or found is None:
            return
        while True:  # the file may be evicted at any time, and recreated by another rank
            unused = path not in self._open
            descriptor = self._descriptor(path, found)
            if unused:
                found.sound = bytearray(len(found.sound))
                eviction.use(descriptor, path)
            blocks = range(byte // BLOCK, (byte + size - 1) // BLOCK + 1)
            missing = [block for block in blocks if not found.sound[block]]
            for block in missing:
                self._fetch(path, found, block)
                found.sound[block] = True
            self._keep_to_limit(len(missing))
            if not missing or _is_at(descriptor, path):
                return
            self._open.pop(path).close()

    def _keep_to_limit(self, blocks: int) -> None:
        """Evict unused files, after every `EVERY` blocks that were looked up."""
        self._blocks += blocks
        if self._limit is None or self._blocks < EVERY:
            return
        self._blocks, folder = 0, cache_folder() / "shards"
        try:
            kept = eviction.evict(folder, self._limit)
            why = f"{kept / 1e9:.1f} GB are in use" if kept > self._limit else None
        except OSError as error:
            why = error.strerror or str(error)
        if why and not self._warned:
            logger.warning("%s is larger than %s allows: %s", folder, eviction.LIMIT, why)
        self._warned = why is not None

    def _descriptor(self, path: str, found: _Object) -> int:
        """Open the file, creating it if it does not exist."""
        try:
            with suppress(FileNotFoundError):
                return self.descriptor(path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab", opener=_no_link):
                return self.descriptor(path)
        except OSError as error:
            _not_kept(found.url, path, error)

    def _fetch(self, path: str, found: _Object, block: int) -> None:
        first = block * BLOCK
        size, sums = min(BLOCK, found.size - first), f"{path}{eviction.SUMS}"
        if _kept(path, sums, block, size):
            return
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab", opener=_no_link), open(sums, "ab", opener=_no_link):
                pass  # both are created
            with (
                open(path, "r+b", buffering=0, opener=_no_link) as file,
                open(sums, "r+b", buffering=0, opener=_no_link) as marks,
            ):
                try:  # held until it is closed
                    fcntl.lockf(marks, fcntl.LOCK_EX, SUM_BYTES, block * SUM_BYTES)
                except OSError as error:
                    logger.debug("no locks on this disk, so several ranks may read a range: %s", error)
                if _sound(file, marks, block, size):  # another rank has fetched it
                    return
                data = self._read(found, first, size)
                _write(file.fileno(), data, first)
                _write(marks.fileno(), xxhash.xxh3_64_digest(data), block * SUM_BYTES)
        except OSError as error:
            _not_kept(found.url, path, error)

    def _read(self, found: _Object, first: int, size: int) -> bytes:
        try:
            data: bytes = found.store.cat_file(found.key, start=first, end=first + size)
        except Exception as error:  # each store has its own exceptions
            _failed(f"{found.url}, from byte {first:,} on,", error)
        if len(data) != size:
            raise EnvironmentProblem(
                f"{found.url}: {size:,} bytes from byte {first:,} on requested, but {len(data):,} received",
                hint="the store must support range requests",
            )
        return data


def _not_kept(url: str, path: str, error: OSError) -> NoReturn:
    raise EnvironmentProblem(
        f"{url} cannot be kept in {path}: {error.strerror or error}",
        hint="make room there, or choose another folder with TITAN_CACHE",
    ) from error


def _no_link(path: str, flags: int) -> int:
    """Open a cached file, without following a symbolic link in its place."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _kept(path: str, sums: str, block: int, size: int) -> bool:
    """Return whether a block is in the cache, as it was written."""
    try:
        with open(sums, "rb") as marks, open(path, "rb") as file:
            return _sound(file, marks, block, size)
    except FileNotFoundError:
        return False


def _sound(file: IO[bytes], marks: IO[bytes], block: int, size: int) -> bool:
    """Return the same for open files: closing one would release the process's locks on it."""
    wanted = os.pread(marks.fileno(), SUM_BYTES, block * SUM_BYTES)
    if len(wanted) < SUM_BYTES or wanted == bytes(SUM_BYTES):
        return False
    return xxhash.xxh3_64_digest(os.pread(file.fileno(), size, block * BLOCK)) == wanted


def _write(descriptor: int, data: bytes, byte: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, byte)
        view, byte = view[count:], byte + count


def _failed(what: str, error: Exception) -> NoReturn:
    raise EnvironmentProblem(
        f"{what} cannot be read: {type(error).__name__}: {error}",
        hint="check the URL, the network and the credentials in the environment (AWS_PROFILE, HF_TOKEN, …)",
    ) from error
