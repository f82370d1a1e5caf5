"""A place in an object store, by its URL, that can be asked what a folder on a disk can. Torch-free.

A store is a component of the kind `store` that is named as the URL's protocol; other protocols are fsspec's,
which is imported then.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import xxhash

from titancli.checkpoint.format.hashed import Digest
from titancli.checkpoint.remote.requests import ABSENT, BRIEFLY, Line
from titancli.errors import EnvironmentProblem, TitanError
from titancli.registry import current
from titancli.registry.component import build

T = TypeVar("T")

TIMEOUT = 1800.0
"""Seconds, where no recipe says how many."""
_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Which of titan's extras brings a protocol's package."""
_BLOCK = 1 << 24
_PART = 50 << 20
"""Bytes of a part in which s3fs uploads large files. Of an object in other parts nobody knows the ETag."""
ATTEMPTS = 3
"""How often a file is sent, or fetched, whose bytes do not arrive as they are."""


class _Size(NamedTuple):
    st_size: int


def at(url: str, timeout_seconds: float = TIMEOUT, patience: float | None = None) -> Path:
    """The place that a URL names, with what `checkpoint.remote_timeout_seconds` says.

    `patience`: seconds for which failing requests are repeated; None: `requests.BRIEFLY`.

    What looks at checkpoints takes a path and asks it for little: its name, its entries, their sizes and
    bytes. This answers all of that, and is a Path for a type checker's sake alone.

    Raises:
        EnvironmentProblem: the package for this kind of store is not installed, or nobody knows the kind.
    """
    store, key = _opened(url)
    line = Line(timeout_seconds, BRIEFLY if patience is None else patience)
    return cast(Path, RemotePath(store, key.rstrip("/"), url.rstrip("/"), line))


def _opened(url: str) -> tuple[Any, str]:
    """Return the store of a URL, and the key in it."""
    protocol, _, key = url.partition("://")
    if any(name.rpartition("/")[2] == protocol for name in current().names("store")):
        return build(current().find("store", protocol)(), url=url), key
    import fsspec

    # Neither shared nor remembered: credentials may have changed, and another process may have written.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("file", "local"):
        options["auto_mkdir"] = True
    try:
        store, key = fsspec.core.url_to_fs(url, **options)
        return store, key
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = f"pip install 'titancli[{extra}]'" if extra else str(error)
        raise EnvironmentProblem(f"{url} needs a package that is not installed", hint=hint) from error
    except ValueError as error:
        raise EnvironmentProblem(
            f"{url} is not the URL of a store: {error}", hint="such as s3://…"
        ) from error


class RemotePath:
    """A place in a store. Its methods are those of `pathlib.Path`, as far as checkpoints need them.

    Raises:
        Unreachable: the store refuses, or does not answer.
    """

    def __init__(self, store: Any, key: str, url: str, line: Line, row: dict[str, Any] | None = None) -> None:
        self._store, self._key, self._url, self._line, self._row = store, key, url, line, row

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._store, self._key.rpartition("/")[0], self._url.rpartition("/")[0], self._line)

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._store, f"{self._key}/{name}", f"{self._url}/{name}", self._line)

    def absolute(self) -> RemotePath:
        return self

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def is_file(self) -> bool:
        return self._kind() == "file"

    def _kind(self) -> str | None:
        """Return what lies here; None: the store says that nothing does. (fsspec's own `isfile` takes every
        error for a no.)"""
        with suppress(*ABSENT):
            return str(self._facts()["type"])
        return None

    def _facts(self) -> dict[str, Any]:
        """Return what the store says of an object. A listing says it too, perhaps of some time ago."""
        return self._row or self._ask("looking at it", lambda: self._store.info(self._key))

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies below, one request for all, sizes included."""
        try:
            rows = self._ask("listing it", lambda: self._store.ls(self._key, detail=True))
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from error
        for row in rows:
            name = row["name"].rstrip("/").rpartition("/")[2]
            if row["name"].strip("/") != self._key.strip("/"):  # some stores list a folder in itself
                yield RemotePath(self._store, f"{self._key}/{name}", f"{self._url}/{name}", self._line, row)

    def stat(self) -> _Size:
        return _Size(self._facts()["size"])

    def read_bytes(self) -> bytes:
        return self._ask("reading it", lambda: self._store.cat_file(self._key))

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[RemoteFile]:
        file = self._ask("opening it", lambda: self._store.open(self._key, mode))
        try:
            yield RemoteFile(self, file)
        finally:
            file.close()

    def digest(self) -> Digest:
        """Size and checksum of the whole object, which is read."""
        state, size = xxhash.xxh3_64(), 0
        with self.open() as file:
            while block := file.read(_BLOCK):
                state.update(block)
                size += len(block)
        return Digest(size, state.hexdigest())

    def get(self, target: Path) -> None:
        """Copy an object into a new file."""

        def moved() -> int:
            return target.stat().st_size if target.exists() else -1

        self._ask("downloading it", lambda: self._store.get_file(self._key, str(target)), moved)

    def put(self, source: Path, digest: Digest, *, read_back: bool = False) -> None:
        """Copy a file into this object, and ensure that what arrived is what was sent.

        By the checksum that the store has made of it, where it has one; with `read_back` by its bytes.

        Raises:
            TitanError: other bytes arrive each time.
        """
        from fsspec.callbacks import Callback

        count = itertools.count()  # of what the store says on the way, if it does
        told = Callback(hooks={"moves": lambda *said, **more: next(count)})
        for _ in range(ATTEMPTS):
            self._ask(
                "uploading it",
                lambda: self._store.put_file(str(source), self._key, callback=told),
                lambda: repr(count),
                changes=True,
            )
            if self._has(source, digest, read_back):
                return
        raise TitanError(f"{self} does not contain what was uploaded, {ATTEMPTS} times")

    def _has(self, source: Path, digest: Digest, read_back: bool) -> bool:
        """Return whether the object's bytes are the file's, as far as the store says."""
        try:
            facts = self._facts()
            if facts["size"] != digest.size:
                return False
            known = _md5_in(facts) if self._line.knows_md5 else None
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
            self._ask("writing it", lambda: self._store.pipe_file(self._key, data), changes=True)
            with suppress(*ABSENT):
                if self.read_bytes() == data:
                    return
        raise TitanError(f"{self} does not contain what was written, {ATTEMPTS} times")

    def unlink(self) -> None:
        """Delete an object, if it is there: who asks again does not know what came of it before."""
        with suppress(*ABSENT):
            self._ask("deleting it", lambda: self._store.rm_file(self._key), changes=True)

    def rmdir(self) -> None:
        """Remove a folder that is empty, if it is there. In most stores a folder is in names alone, and gone
        with the last of them."""

        def remove() -> None:
            with suppress(FileExistsError, NotImplementedError):  # an object that stands for the folder
                self._store.rmdir(self._key)

        with suppress(*ABSENT):
            if self.is_dir() and not any(self.iterdir()):
                self._ask("removing it", remove, changes=True)

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


def _md5_in(facts: dict[str, Any]) -> str | None:
    """Return the MD5 checksum that a store reports of an object, in hexadecimal digits, if it does. Of one
    that was uploaded in parts, S3 reports one over theirs, and their number."""
    if etag := str(facts.get("ETag") or "").strip('"'):
        return etag
    if in_base64 := facts.get("md5Hash"):  # Google Cloud Storage
        return b64decode(in_base64).hex()
    return None


def _md5_of(path: Path, *, parts: bool) -> str:
    """Return the MD5 checksum of a file, or what S3 reports of one that was uploaded in parts."""
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
    """An object that is open for reading, under the limit of its store."""

    def __init__(self, place: RemotePath, file: Any) -> None:
        self._place, self._file, self._position = place, file, 0

    def read(self, size: int) -> bytes:
        def read() -> bytes:
            self._file.seek(self._position)  # an attempt that failed may have moved it
            return cast(bytes, self._file.read(size))

        data = self._place._ask("reading it", read)
        self._position += len(data)
        return data
