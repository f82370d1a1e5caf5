"""Stores of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO, Any, NamedTuple, Protocol


class Entry(NamedTuple):
    """An object in a store, or a folder of objects."""

    name: str
    """The last part of its key."""
    size: int | None
    """Bytes of the object; None: it is a folder."""
    md5: str | None = None
    """MD5 checksum of the bytes in hexadecimal digits, or what S3 reports of an object that was uploaded in
    parts; None: the store has none, and what was written is compared by size."""


class Store(Protocol):
    """Objects by key. A key is what follows `://` in a URL, without a slash at either end.

    Each call is made in a thread of its own, several at once, and by several runs and machines. titan limits
    its time: a call that makes no progress for checkpoint.remote_timeout_seconds counts as failed, and its
    thread is left behind. A call that raises is repeated for some seconds, except after FileNotFoundError,
    PermissionError, NotImplementedError and titan's own errors. FileNotFoundError, and nothing else, says
    that there is nothing of this key. A store need not check what was written: titan does.
    """

    def stat(self, key: str) -> Entry:
        """Return what lies at a key.

        Raises:
            FileNotFoundError: nothing does.
        """
        ...

    def read(self, key: str, start: int, size: int) -> bytes:
        """Return up to `size` bytes from byte `start` on; fewer only at the end of the object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        ...

    def write(self, key: str, source: IO[bytes]) -> None:
        """Write a whole object, in place of the one that may be there; it appears whole, or not at all.

        `source` is open at its first byte; its position tells titan that the call makes progress."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object.

        Raises:
            FileNotFoundError: there is none, which titan takes as done.
        """
        ...

    def list(self, key: str) -> Iterable[Entry]:
        """Return what lies directly below a folder, and what has been written before.

        Raises:
            FileNotFoundError: there is no such folder; a store without folders returns nothing instead.
        """
        ...


class StoreDefaults:
    """Optional members of a store."""

    download: Callable[[str, str], None] | None = None
    """Write the object of a key to a local path, `download(key, path)`; None: it is read in blocks."""
    delete_folder: Callable[[str], None] | None = None
    """Delete the empty folder of a key; None: folders are no more than parts of keys."""


class StoreBuilder(Protocol):
    def __call__(self, config: Any, *, url: str) -> Store:
        """Build the store of a URL; its calls are given the keys of this and of other URLs with the same
        scheme."""
        ...
