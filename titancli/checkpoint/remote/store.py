"""A place in an object store, by its URL, that can be asked what a folder on a disk can. Torch-free.

fsspec knows the stores; it is imported when a URL is used.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import xxhash

from titancli.checkpoint.format.disk import FULL
from titancli.checkpoint.format.hashed import Digest
from titancli.checkpoint.format.manifest import MANIFEST
from titancli.errors import EXIT_ENVIRONMENT, EnvironmentProblem, TitanError

T = TypeVar("T")

TIMEOUT = 1800.0
"""Seconds, where no recipe says how many."""
_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Which of titan's extras brings a protocol's package."""
_BLOCK = 1 << 24


class Unreachable(TitanError):
    """A store did not do what it was asked to. It says nothing about what lies there, so this is no
    `EnvironmentProblem`, which a checkpoint that cannot be read is."""

    exit_code = EXIT_ENVIRONMENT


class _Size(NamedTuple):
    st_size: int


class _Line(NamedTuple):
    """What all places of one store share."""

    limit: float
    """Seconds without progress after which a request has failed."""
    stuck: list[threading.Thread]
    """Requests that change something, and that nobody waits for any longer: one of them may go on later, so
    nothing is to be changed before it ends."""


def at(url: str, timeout_seconds: float = TIMEOUT) -> Path:
    """The place that a URL names, with what `checkpoint.remote_timeout_seconds` says.

    What looks at checkpoints takes a path and asks it for little: its name, its entries, their sizes and
    bytes. This answers all of that, and is a Path for a type checker's sake alone.

    Raises:
        EnvironmentProblem: the package for this kind of store is not installed, or nobody knows the kind.
    """
    import fsspec

    protocol = url.partition("://")[0]
    # Neither shared nor remembered: credentials may have changed, and another process may have written.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("file", "local"):
        options["auto_mkdir"] = True
    try:
        store, key = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = f"pip install 'titancli[{extra}]'" if extra else str(error)
        raise EnvironmentProblem(f"{url} needs a package that is not installed", hint=hint) from error
    except ValueError as error:
        raise EnvironmentProblem(
            f"{url} is not the URL of a store: {error}", hint="such as s3://…"
        ) from error
    line = _Line(timeout_seconds, [])
    return cast(Path, RemotePath(store, key.rstrip("/"), url.rstrip("/"), line))


class RemotePath:
    """A place in a store. Its methods are those of `pathlib.Path`, as far as checkpoints need them.

    Raises:
        Unreachable: the store refuses, or does not answer.
    """

    def __init__(
        self, store: Any, key: str, url: str, line: _Line, row: dict[str, Any] | None = None
    ) -> None:
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
        if self._row:
            return bool(self._row["type"] == "directory")
        return self._ask("looking for it", lambda: self._store.isdir(self._key))

    def is_file(self) -> bool:
        if self._row:
            return bool(self._row["type"] == "file")
        return self._ask("looking for it", lambda: self._store.isfile(self._key))

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
        row = self._row or self._ask("looking at it", lambda: self._store.info(self._key))
        return _Size(row["size"])

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

    def put(self, source: Path) -> None:
        """Copy a file into this object."""
        from fsspec.callbacks import Callback

        count = itertools.count()  # of what the store says on the way, if it does
        told = Callback(hooks={"moves": lambda *said, **more: next(count)})
        self._ask(
            "uploading it",
            lambda: self._store.put_file(str(source), self._key, callback=told),
            lambda: repr(count),
            changes=True,
        )

    def write_bytes(self, data: bytes) -> None:
        self._ask("writing it", lambda: self._store.pipe_file(self._key, data), changes=True)

    def unlink(self) -> None:
        """Delete an object."""
        self._ask("deleting it", lambda: self._store.rm_file(self._key), changes=True)

    def delete(self) -> None:
        """Delete a checkpoint, if there is one, its manifest first."""
        with suppress(FileNotFoundError):
            (self / MANIFEST).unlink()
        with suppress(FileNotFoundError):
            self._ask("deleting it", lambda: self._store.rm(self._key, recursive=True), changes=True)

    def _ask(
        self,
        doing: str,
        request: Callable[[], T],
        moved: Callable[[], object] = lambda: None,
        *,
        changes: bool = False,
    ) -> T:
        """Return what a request to the store returns, which is made in a thread: one that hangs is left.

        Args:
            moved: returns something else whenever the request has got further.
            changes: the request changes what the store has.

        Raises:
            Unreachable: the store has its own classes of errors; or it has not answered within the limit.
            OSError: what was asked for is not there, or the disk is full: that is left to who asks.
        """
        line = self._line
        if changes and any(thread.is_alive() for thread in line.stuck):
            raise self._unreachable(f"{doing} has not begun: the store has still not answered before")
        answer: list[T] = []
        failures: list[BaseException] = []

        def work() -> None:
            try:
                answer.append(request())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work, name="titan-store", daemon=True)
        thread.start()
        while thread.is_alive():
            before = moved()
            thread.join(line.limit)
            if thread.is_alive() and moved() == before:
                if changes:
                    line.stuck.append(thread)
                raise self._unreachable(
                    f"{doing} has made no progress for {line.limit:g} seconds (the limit is "
                    "checkpoint.remote_timeout_seconds)"
                )
        if not failures:
            return answer[0]
        error = failures[0]
        known = isinstance(error, (TitanError, FileNotFoundError, NotADirectoryError))
        if known or not isinstance(error, Exception) or (isinstance(error, OSError) and error.errno in FULL):
            raise error
        raise self._unreachable(f"{type(error).__name__}: {error}") from error

    def _unreachable(self, why: str) -> Unreachable:
        return Unreachable(
            f"{self} cannot be reached: {why}",
            hint="check the network, the endpoint and the credentials in the environment (AWS_PROFILE, …)",
        )


class RemoteFile:
    """An object that is open for reading, under the limit of its store."""

    def __init__(self, place: RemotePath, file: Any) -> None:
        self._place, self._file = place, file

    def read(self, size: int) -> bytes:
        return self._place._ask("reading it", lambda: self._file.read(size))
