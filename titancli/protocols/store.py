"""Stores of checkpoints, by the protocol of their URLs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO, Protocol


class Store(Protocol):
    """Objects under keys: what follows `PROTOCOL://` in a URL, such as `"bucket/run/step-10/manifest.json"`.

    The methods are a part of `fsspec.AbstractFileSystem`, so each of its file systems is a store. They are
    called in threads, and raise FileNotFoundError where nothing is there. Whatever else they raise is taken
    for a failure that may pass, and the request is repeated; one that hangs is left after
    `checkpoint.remote_timeout_seconds`. An object is written whole or not at all.
    """

    def info(self, path: str) -> Mapping[str, Any]:
        """Return `name`, `size` in bytes and `type` ("file" or "directory") of what lies there. With `ETag`,
        its MD5 checksum, what was uploaded is verified without reading it back."""
        ...

    def ls(self, path: str, detail: bool = True) -> list[Mapping[str, Any]]:
        """Return the same of everything directly below, as it is now."""
        ...

    def cat_file(self, path: str) -> bytes:
        """Return the bytes of an object."""
        ...

    def open(self, path: str, mode: str = "rb") -> BinaryIO:
        """Open an object for reading, at any place."""
        ...

    def get_file(self, rpath: str, lpath: str) -> None:
        """Copy an object into a file of the disk."""
        ...

    def put_file(self, lpath: str, rpath: str, callback: Any = None) -> None:
        """Copy a file of the disk into an object."""
        ...

    def pipe_file(self, path: str, value: bytes) -> None:
        """Write an object."""
        ...

    def rm_file(self, path: str) -> None:
        """Delete an object."""
        ...

    def rmdir(self, path: str) -> None:
        """Remove an empty folder, in a store that has them."""
        ...


class StoreBuilder(Protocol):
    def __call__(self, config: Any, *, url: str) -> Store:
        """Open the store of a URL. The config has its defaults: credentials come from the environment."""
        ...
