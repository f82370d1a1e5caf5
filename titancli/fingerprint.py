"""What tells files from others by their names, sizes and contents. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

import xxhash

BLOCK_BYTES = 1 << 20
WHOLE_BYTES = 256 << 20
"""Up to so much in all, every byte counts; beyond, names, sizes, and both ends of files."""
END_BYTES = 64 << 10


def fingerprint(
    files: Sequence[tuple[str, str, int]],
    checked: Callable[[str, Iterable[bytes]], Iterable[bytes]] = lambda path, blocks: blocks,
) -> str:
    """Return xxh3-128 over files, each a path, a name and a size in bytes.

    `checked` is given the path and the bytes of each file that is read whole, and passes them on.

    Raises:
        OSError: a file cannot be read; `filename` says which.
    """
    digest = xxhash.xxh3_128()
    whole = sum(size for _, _, size in files) <= WHOLE_BYTES
    for path, name, size in files:
        digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
        try:
            with open(path, "rb") as file:
                for block in checked(path, _blocks(file)) if whole else _ends(file, size):
                    digest.update(block)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
    return digest.hexdigest()


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(BLOCK_BYTES), b"")


def _ends(file: BinaryIO, size: int) -> Iterator[bytes]:
    yield file.read(END_BYTES)
    file.seek(max(0, size - END_BYTES))
    yield file.read(END_BYTES)
