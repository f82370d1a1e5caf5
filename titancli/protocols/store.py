"""Stores of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO, Any, NamedTuple, Protocol


class Entry(NamedTuple):
    """An object in a store, or a folder of objects."""

    name: str
    """The last part of its key."""
    size: int | None
    """The size of the object in bytes; None for a folder."""
    md5: str | None = None
    """MD5 checksum of the bytes in hexadecimal digits, or for an object uploaded in parts the ETag of S3;
    None: unknown, and uploads are verified by size."""


class Store(Protocol):
    """Objects by key. A key is the part of a URL after `://`, without a slash at either end.

    Each call runs in its own thread; several run at once, also from other runs and machines. A call that
    makes no progress for checkpoint.remote_timeout_seconds counts as failed, and its thread is abandoned. A
    call that raises is repeated for some seconds, except after FileNotFoundError, PermissionError,
    NotImplementedError and titan's own errors. Only FileNotFoundError means that the key does not exist. A
    store need not verify what it has written: titan does.
    """

    def stat(self, key: str) -> Entry:
        """Return the entry of a key.

        Raises:
            FileNotFoundError: the key does not exist.
        """
        ...

    def read(self, key: str, start: int, size: int) -> bytes:
        """Return up to `size` bytes from byte `start`; fewer only at the end of the object.

        Raises:
            FileNotFoundError: the object does not exist.
        """
        ...

    def write(self, key: str, source: IO[bytes]) -> None:
        """Write a whole object, replacing an existing one; it appears completely or not at all.

        `source` is open at its first byte; its position shows titan the progress of the call."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object.

        Raises:
            FileNotFoundError: the object does not exist, which titan accepts.
        """
        ...

    def list(self, key: str) -> Iterable[Entry]:
        """Return the entries directly below a folder, including everything written before.

        Raises:
            FileNotFoundError: the folder does not exist; a store without folders returns nothing instead.
        """
        ...


class StoreDefaults:
    """Optional members of a store."""

    download: Callable[[str, str], None] | None = None
    """Download an object to a local path: `download(key, path)`; None: it is read in blocks."""
    delete_folder: Callable[[str], None] | None = None
    """Delete the empty folder of a key; None: folders are only parts of keys."""


class StoreBuilder(Protocol):
    def __call__(self, config: Any, *, url: str) -> Store:
        """Build the store of a URL; its calls receive keys of this and other URLs with the same scheme."""
        ...
