"""Paths in a store of checkpoints, by URL, with the methods of a path on a disk. Torch-free.

The store is a component of the kind `store`: a plugin's, named by the URL's scheme or by the recipe, or else
`fsspec`, which knows object stores.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO, FileIO
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import xxhash

from titancli.checkpoint.format.hashed import Digest
from titancli.checkpoint.remote.requests import ABSENT, BRIEFLY, Line
from titancli.errors import PluginError, TitanError
from titancli.protocols.store import Entry
from titancli.recipe.find import store_type
from titancli.registry import current
from titancli.registry.component import build

T = TypeVar("T")

TIMEOUT = 1800.0
"""Seconds without progress after which a request fails, unless the recipe sets another limit."""
_BLOCK = 1 << 24
_PART = 50 << 20
"""Bytes of the parts in which s3fs uploads large files; the ETag of an object in other parts is unknown."""
ATTEMPTS = 3
"""Attempts to send or fetch a file whose bytes arrive changed."""


class _Size(NamedTuple):
    st_size: int


def at(url: str, timeout_seconds: float = TIMEOUT, patience: float | None = None, store: Any = None) -> Path:
    """Return the path of a URL.

    Code that reads checkpoints needs little of a path: its name, its entries, their sizes and bytes. The
    result offers just that, and is declared a `Path` only for the type checker.

    Args:
        timeout_seconds: as `checkpoint.remote_timeout_seconds`.
        patience: seconds for which failing requests are repeated; None: `requests.BRIEFLY`.
        store: the config of the store, `checkpoint.store`; None: the one of the URL's scheme, with its
            defaults.

    Raises:
        EnvironmentProblem: the package for this kind of store is not installed, or no store has this scheme.
        PluginError: the store cannot be built.
    """
    if store is None:
        store = current().find("store", store_type(url, current()))()
    try:
        built = build(store, url=url)
    except TitanError:
        raise
    except Exception as error:
        name = current().full_name(type(store))
        raise PluginError(
            f"the store {name} cannot be built for {url}: {type(error).__name__}: {error}",
            hint="[checkpoint.store] sets its fields",
        ) from error
    line = Line(timeout_seconds, BRIEFLY if patience is None else patience)
    return cast(Path, RemotePath(built, url.rstrip("/"), line))


class RemotePath:
    """A path in a store, with those methods of `pathlib.Path` that checkpoints need.

    Raises:
        Unreachable: the store refuses, or does not answer.
        PluginError: the store returns a value that its protocol does not allow.
    """

    def __init__(self, store: Any, url: str, line: Line, entry: Entry | None = None) -> None:
        self._store, self._url, self._line, self._listed = store, url, line, entry
        self._key = url.partition("://")[2].strip("/")

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._store, self._url.rpartition("/")[0], self._line)

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._store, f"{self._url}/{name}", self._line)

    def absolute(self) -> RemotePath:
        return self

    def is_dir(self) -> bool:
        with suppress(*ABSENT):
            return self._entry().size is None
        return False

    def is_file(self) -> bool:
        with suppress(*ABSENT):
            return self._entry().size is not None
        return False

    def _entry(self) -> Entry:
        """Return the object's entry: of a listing, which may be outdated, or of the store."""
        return self._listed or self._look()

    def _look(self) -> Entry:
        found = self._ask("looking at it", lambda: self._store.stat(self._key))
        return self._checked("stat", found, _is_entry(found))

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the entries of the folder, with their sizes; one request."""
        try:
            entries = self._ask("listing it", lambda: tuple(self._store.list(self._key)))
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from error
        for entry in entries:
            self._checked("list", entry, _is_entry(entry) and entry.name and "/" not in entry.name)
            yield RemotePath(self._store, f"{self._url}/{entry.name}", self._line, entry)

    def stat(self) -> _Size:
        return _Size(self._entry().size or 0)

    def read_bytes(self) -> bytes:
        if len(data := self.read(0, _BLOCK)) < _BLOCK:
            return data
        with self.open() as file:
            return b"".join(iter(lambda: file.read(_BLOCK), b""))

    def read(self, start: int, size: int) -> bytes:
        """Read up to `size` bytes from byte `start` on; one request."""
        data = self._ask("reading it", lambda: self._store.read(self._key, start, size))
        return self._checked("read", data, isinstance(data, bytes) and len(data) <= size)

    def _checked(self, method: str, answer: T, right: object) -> T:
        """Return an answer of the store.

        Raises:
            PluginError: it is not what the store's protocol demands.
        """
        if right:
            return answer
        what = f"{len(answer):,} bytes" if isinstance(answer, bytes) else f"{answer!r:.80}"
        raise PluginError(
            f"{self}: {method} of the store ({type(self._store).__name__}) returned {what}",
            hint="see titancli.protocols.Store",
        )

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[RemoteFile]:
        yield RemoteFile(self, self.stat().st_size)

    def digest(self) -> Digest:
        """Read the whole object, and return its size and checksum."""
        state, size = xxhash.xxh3_64(), 0
        with self.open() as file:
            while block := file.read(_BLOCK):
                state.update(block)
                size += len(block)
        return Digest(size, state.hexdigest())

    def get(self, target: Path) -> None:
        """Copy an object into a new file."""
        if (download := self._store.download) is not None:

            def moved() -> int:
                return target.stat().st_size if target.exists() else -1

            self._ask("downloading it", lambda: download(self._key, str(target)), moved)
            return
        with self.open() as file, open(target, "wb") as written:
            while data := file.read(_BLOCK):
                written.write(data)

    def put(self, source: Path, digest: Digest, *, read_back: bool = False) -> None:
        """Upload a file to this object, and verify it: by the store's checksum if there is one, and with
        `read_back` by reading the object.

        Raises:
            TitanError: other bytes arrive each time.
        """
        for _ in range(ATTEMPTS):
            self._write("uploading it", lambda: FileIO(str(source)))
            if self._has(source, digest, read_back):
                return
        raise TitanError(f"{self} does not contain what was uploaded, {ATTEMPTS} times")

    def _write(self, doing: str, opened: Callable[[], IO[bytes] | FileIO]) -> None:
        """Write the object from a file that `opened` opens, again for each attempt."""
        sources: list[Any] = []

        def write() -> None:
            with opened() as source:
                sources.append(source)
                self._store.write(self._key, source)

        def moved() -> object:
            with suppress(ValueError, OSError):  # it is closed, or the thread is closing it meanwhile
                return len(sources), sources[-1].tell() if sources else None
            return None

        self._ask(doing, write, moved, changes=True)

    def _has(self, source: Path, digest: Digest, read_back: bool) -> bool:
        """Return whether the object equals the file, as far as the store tells."""
        try:
            entry = self._look()
            if entry.size != digest.size:
                return False
            known = entry.md5 if self._line.knows_md5 else None
            if known is not None and known != _md5_of(source, parts="-" in known):
                if self.digest() != digest:
                    return False
                self._line.knows_md5 = False  # encrypted by the store, or in parts of another size
                return True
            return not read_back or self.digest() == digest
        except ABSENT:
            return False

    def write_bytes(self, data: bytes) -> None:
        """Write a small object, and read it back.

        Raises:
            TitanError: other bytes arrive each time.
        """
        for _ in range(ATTEMPTS):
            self._write("writing it", lambda: BytesIO(data))
            with suppress(*ABSENT):
                if self.read_bytes() == data:
                    return
        raise TitanError(f"{self} does not contain what was written, {ATTEMPTS} times")

    def unlink(self) -> None:
        """Delete the object; no error if it is gone, since an earlier attempt may have succeeded."""
        with suppress(*ABSENT):
            self._ask("deleting it", lambda: self._store.delete(self._key), changes=True)

    def rmdir(self) -> None:
        """Remove the folder if it exists and is empty, and the store has folders."""
        if (delete_folder := self._store.delete_folder) is None:
            return
        with suppress(*ABSENT):
            if self.is_dir() and not any(self.iterdir()):
                self._ask("removing it", lambda: delete_folder(self._key), changes=True)

    def _ask(
        self,
        doing: str,
        request: Callable[[], T],
        moved: Callable[[], object] = lambda: None,
        *,
        changes: bool = False,
    ) -> T:
        """See `Line.ask`."""
        return self._line.ask(self, doing, request, moved, changes=changes)


def _is_entry(found: object) -> bool:
    return isinstance(found, Entry) and isinstance(found.name, str) and isinstance(found.size, int | None)


def _md5_of(path: Path, *, parts: bool) -> str:
    """Return the MD5 checksum of a file, or the ETag that S3 gives a file that was uploaded in parts."""
    whole, sums = hashlib.md5(usedforsecurity=False), []
    with open(path, "rb") as file:
        while block := file.read(_PART):
            if parts:
                sums.append(hashlib.md5(block, usedforsecurity=False).digest())
            else:
                whole.update(block)
    if not parts:
        return whole.hexdigest()
    return f"{hashlib.md5(b''.join(sums), usedforsecurity=False).hexdigest()}-{len(sums)}"


class RemoteFile:
    """An object that is read sequentially, with the time limit of its store."""

    def __init__(self, place: RemotePath, size: int) -> None:
        self._place, self._size, self._position = place, size, 0

    def read(self, size: int) -> bytes:
        size = min(size, self._size - self._position)  # stores refuse to read beyond the end
        data = self._place.read(self._position, size) if size else b""
        self._position += len(data)
        return data
