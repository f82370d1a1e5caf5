"""A place in an object store, by its URL, that can be asked what a folder on a disk can. Torch-free.

fsspec knows the stores; it is imported when a URL is used.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import xxhash

from titancli.checkpoint.format.disk import FULL
from titancli.checkpoint.format.hashed import Digest
from titancli.checkpoint.format.manifest import MANIFEST
from titancli.errors import EXIT_ENVIRONMENT, EnvironmentProblem, TitanError

_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Which of titan's extras brings a protocol's package."""
_BLOCK = 1 << 24


class Unreachable(TitanError):
    """A store did not do what it was asked to. It says nothing about what lies there, so this is no
    `EnvironmentProblem`, which a checkpoint that cannot be read is."""

    exit_code = EXIT_ENVIRONMENT


class _Size(NamedTuple):
    st_size: int


def at(url: str) -> Path:
    """The place that a URL names.

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
    return cast(Path, RemotePath(store, key.rstrip("/"), url.rstrip("/")))


@contextmanager
def _asking(place: object) -> Iterator[None]:
    """Each store has its own classes of errors. What is not there, and a full disk, are left to who asks."""
    try:
        yield
    except (TitanError, FileNotFoundError, NotADirectoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        raise Unreachable(
            f"{place} cannot be reached: {type(error).__name__}: {error}",
            hint="check the network, the endpoint and the credentials in the environment (AWS_PROFILE, …)",
        ) from error


class RemotePath:
    """A place in a store. Its methods are those of `pathlib.Path`, as far as checkpoints need them.

    Raises:
        Unreachable: the store refuses, or does not answer.
    """

    def __init__(self, store: Any, key: str, url: str, row: dict[str, Any] | None = None) -> None:
        self._store, self._key, self._url, self._row = store, key, url, row

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._store, self._key.rpartition("/")[0], self._url.rpartition("/")[0])

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._store, f"{self._key}/{name}", f"{self._url}/{name}")

    def absolute(self) -> RemotePath:
        return self

    def is_dir(self) -> bool:
        with _asking(self):
            return self._row["type"] == "directory" if self._row else self._store.isdir(self._key)

    def is_file(self) -> bool:
        with _asking(self):
            return self._row["type"] == "file" if self._row else self._store.isfile(self._key)

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies below, one request for all, sizes included."""
        with _asking(self):
            try:
                rows = self._store.ls(self._key, detail=True)
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from error
        for row in rows:
            name = row["name"].rstrip("/").rpartition("/")[2]
            if row["name"].strip("/") != self._key.strip("/"):  # some stores list a folder in itself
                yield RemotePath(self._store, f"{self._key}/{name}", f"{self._url}/{name}", row)

    def stat(self) -> _Size:
        with _asking(self):
            return _Size((self._row or self._store.info(self._key))["size"])

    def read_bytes(self) -> bytes:
        with _asking(self):
            return self._store.cat_file(self._key)

    def open(self, mode: str = "rb") -> Any:
        with _asking(self):
            return self._store.open(self._key, mode)

    def digest(self) -> Digest:
        """Size and checksum of the whole object, which is read."""
        state, size = xxhash.xxh3_64(), 0
        with _asking(self), self._store.open(self._key, "rb") as file:
            while block := file.read(_BLOCK):
                state.update(block)
                size += len(block)
        return Digest(size, state.hexdigest())

    def get(self, target: Path) -> None:
        """Copy an object into a new file."""
        with _asking(self):
            self._store.get_file(self._key, str(target))

    def put(self, source: Path, moves: Callable[[], None] = lambda: None) -> None:
        """Copy a file into this object. `moves` is called on the way, if the store says how far it is."""
        from fsspec.callbacks import Callback

        with _asking(self):
            told = Callback(hooks={"moves": lambda *said, **more: moves()})
            self._store.put_file(str(source), self._key, callback=told)

    def write_bytes(self, data: bytes) -> None:
        with _asking(self):
            self._store.pipe_file(self._key, data)

    def unlink(self) -> None:
        """Delete an object."""
        with _asking(self):
            self._store.rm_file(self._key)

    def delete(self) -> None:
        """Delete a checkpoint, if there is one, its manifest first."""
        with suppress(FileNotFoundError):
            (self / MANIFEST).unlink()
        with _asking(self), suppress(FileNotFoundError):
            self._store.rm(self._key, recursive=True)
