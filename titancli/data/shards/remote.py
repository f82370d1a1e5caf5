"""Token shards in an object store: read by ranges, each kept on this machine once it was read.

fsspec knows the stores. A shard's file in titan's cache is as long as in the store, with holes; beside it are
the checksums of the blocks that are there, which are verified once in each process.
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

logger = logging.getLogger(__name__)

BLOCK = 1 << 21
"""Bytes that are read at once."""
SUM_BYTES = 8
EVERY = 32
"""Blocks after which a process sees to it that the cache does not grow beyond its limit."""
EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Which of titan's extras brings a protocol's package."""


@dataclass
class _Object:
    """A file in a store."""

    store: Any
    key: str
    url: str
    size: int
    sound: bytearray
    """For each block, whether this process has seen that it is there, since it opened the file."""


class RemoteFiles(OpenFiles):
    """Files of the cache, which are filled as far as they are read; others are as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._objects: dict[str, _Object] = {}
        self._limit, self._blocks, self._told = eviction.limit(), EVERY, False

    def index(self, url: str) -> Index:
        """Return the index of token shards in a store, in whose folder of the cache files are then read.

        Raises:
            EnvironmentProblem: the store cannot be reached, or its files are not as long as the index says.
        """
        store, key = _store(url)
        try:
            if (store.info(f"{key}/{INDEX}").get("size") or 0) > INDEX_BYTES:
                raise EnvironmentProblem(
                    f"{url}/{INDEX} has more than {INDEX_BYTES:,} bytes: it is no index",
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
        except Exception as error:  # each store has its own classes of errors
            _failed(url, error)
        return index

    def _verify(self, found: _Object, sums: str, check: FullCheck) -> None:
        """Read all of an object, past the cache.

        Raises:
            EnvironmentProblem: it is not what the index says.
        """
        there = ChunkSums()
        for first in range(0, found.size, BLOCK):
            data = self._read(found, first, min(BLOCK, found.size - first))
            there.update(data)
            check.count(found.url, len(data))
        if there.all != sums:
            byte = first_difference(sums, there.all)
            raise EnvironmentProblem(
                f"token shards: {found.url}: the data from byte {byte:,} on are not those of {INDEX}",
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
        while True:  # the file may be removed at any time, and made again by another rank
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
        """Remove what is unused, after so many blocks that were looked for."""
        self._blocks += blocks
        if self._limit is None or self._blocks < EVERY:
            return
        self._blocks, folder = 0, cache_folder() / "shards"
        try:
            kept = eviction.evict(folder, self._limit)
            why = f"{kept / 1e9:.1f} GB are in use" if kept > self._limit else None
        except OSError as error:
            why = error.strerror or str(error)
        if why and not self._told:
            logger.warning("%s is larger than %s allows: %s", folder, eviction.LIMIT, why)
        self._told = why is not None

    def _descriptor(self, path: str, found: _Object) -> int:
        """Open the file, which is made if it is not there."""
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
                pass  # there they are
            with (
                open(path, "r+b", buffering=0, opener=_no_link) as file,
                open(sums, "r+b", buffering=0, opener=_no_link) as marks,
            ):
                try:  # until it is closed
                    fcntl.lockf(marks, fcntl.LOCK_EX, SUM_BYTES, block * SUM_BYTES)
                except OSError as error:
                    logger.debug("no locks on this disk, so several ranks may read a range: %s", error)
                if _sound(file, marks, block, size):  # another rank was faster
                    return
                data = self._read(found, first, size)
                _write(file.fileno(), data, first)
                _write(marks.fileno(), xxhash.xxh3_64_digest(data), block * SUM_BYTES)
        except OSError as error:
            _not_kept(found.url, path, error)

    def _read(self, found: _Object, first: int, size: int) -> bytes:
        try:
            data: bytes = found.store.cat_file(found.key, start=first, end=first + size)
        except Exception as error:  # each store has its own classes of errors
            _failed(f"{found.url}, from byte {first:,} on,", error)
        if len(data) != size:
            raise EnvironmentProblem(
                f"{found.url}: {size:,} bytes from byte {first:,} on were asked for, and {len(data):,} came",
                hint="the store must answer requests for ranges",
            )
        return data


def _not_kept(url: str, path: str, error: OSError) -> NoReturn:
    raise EnvironmentProblem(
        f"{url} cannot be kept in {path}: {error.strerror or error}",
        hint="make room there, or choose another folder with TITAN_CACHE",
    ) from error


def _no_link(path: str, flags: int) -> int:
    """Open a file of the cache, not what a link in its place leads to."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _is_at(descriptor: int, path: str) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _kept(path: str, sums: str, block: int, size: int) -> bool:
    """Whether a block is in the cache, as it was written."""
    try:
        with open(sums, "rb") as marks, open(path, "rb") as file:
            return _sound(file, marks, block, size)
    except FileNotFoundError:
        return False


def _sound(file: IO[bytes], marks: IO[bytes], block: int, size: int) -> bool:
    """The same of files that are open: to close one would end the locks that this process has on it."""
    wanted = os.pread(marks.fileno(), SUM_BYTES, block * SUM_BYTES)
    if len(wanted) < SUM_BYTES or wanted == bytes(SUM_BYTES):
        return False
    return xxhash.xxh3_64_digest(os.pread(file.fileno(), size, block * BLOCK)) == wanted


def _write(descriptor: int, data: bytes, byte: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, byte)
        view, byte = view[count:], byte + count


def _store(url: str) -> tuple[Any, str]:
    import fsspec

    protocol = url.partition("://")[0]
    try:
        store, key = fsspec.core.url_to_fs(url)
    except ImportError as error:
        hint = f"pip install 'titancli[{EXTRAS[protocol]}]'" if protocol in EXTRAS else str(error)
        raise EnvironmentProblem(f"{url} needs a package that is not installed", hint=hint) from error
    except ValueError as error:
        raise EnvironmentProblem(
            f"{url} is not the URL of a store: {error}", hint="such as s3://…"
        ) from error
    return store, key.rstrip("/")


def _failed(what: str, error: Exception) -> NoReturn:
    raise EnvironmentProblem(
        f"{what} cannot be read: {type(error).__name__}: {error}",
        hint="check the URL, the network and the credentials in the environment (AWS_PROFILE, HF_TOKEN, …)",
    ) from error
