"""The store `fsspec`: object stores by their fsspec file systems. Torch-free."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any, cast

from titancli.object_store import file_system
from titancli.protocols.store import Entry

if TYPE_CHECKING:
    from titancli.checkpoint.remote import Fsspec


class FsspecStore:
    """An fsspec file system as a store.

    Raises:
        EnvironmentProblem: the package for this protocol is not installed, or fsspec does not know it.
    """

    def __init__(self, config: Fsspec, *, url: str) -> None:
        self._scheme, _, rest = url.partition("://")
        self._start = f"{self._scheme}://{'/' if rest.startswith('/') else ''}"
        # Neither shared nor remembered: credentials may have changed, and another process may have written.
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if self._scheme in ("file", "local"):
            options["auto_mkdir"] = True
        self._system, _ = file_system(url, **options)

    def _path(self, key: str) -> str:
        return str(self._system._strip_protocol(f"{self._start}{key}"))

    def stat(self, key: str) -> Entry:
        # fsspec's own `isfile` takes every error for a no.
        return _entry(self._system.info(self._path(key)))

    def list(self, key: str) -> Iterator[Entry]:
        path = self._path(key)
        for row in self._system.ls(path, detail=True):
            if row["name"].strip("/") != path.strip("/"):  # some file systems list a folder in itself
                yield _entry(row)

    def read(self, key: str, start: int, size: int) -> bytes:
        data = self._system.cat_file(self._path(key), start=start, end=start + size)
        # Servers that cannot send a range send the whole object.
        return cast(bytes, data if len(data) <= size else data[start : start + size])

    def download(self, key: str, path: str) -> None:
        self._system.get_file(self._path(key), path)

    def write(self, key: str, source: IO[bytes]) -> None:
        from fsspec.callbacks import Callback

        if isinstance(source, BytesIO):
            self._system.pipe_file(self._path(key), source.getvalue())
            return
        # File systems send a file in parts of their own; its position tells how far they are.
        progress = Callback(hooks={"moves": lambda size, value, **more: source.seek(value)})
        self._system.put_file(source.name, self._path(key), callback=progress)

    def delete(self, key: str) -> None:
        self._system.rm_file(self._path(key))

    def delete_folder(self, key: str) -> None:
        with suppress(FileExistsError, NotImplementedError):  # an object that stands for the folder
            self._system.rmdir(self._path(key))


def _entry(row: dict[str, Any]) -> Entry:
    name = row["name"].rstrip("/").rpartition("/")[2]
    size = None if row["type"] == "directory" else row["size"] or 0  # of some objects nobody knows it
    return Entry(name, size, _md5_in(row))


def _md5_in(row: dict[str, Any]) -> str | None:
    """Return the MD5 checksum that a file system reports of an object, in hexadecimal digits, if it does. Of
    an object that was uploaded in parts, S3 reports one over theirs, and their number."""
    if etag := str(row.get("ETag") or "").strip('"'):
        return etag
    if in_base64 := row.get("md5Hash"):  # Google Cloud Storage
        return b64decode(in_base64).hex()
    return None
