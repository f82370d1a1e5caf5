"""Files on this machine that the library `datasets` is about to read, which anybody may have written.

The library opens whatever has a name that it knows, decompresses it whole, and loads the YAML of a README.md.
Torch-free.
"""

from __future__ import annotations

import bz2
import errno
import logging
import lzma
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from titancli.data.compressed import BLOCK, largest, open_plain, too_large
from titancli.data.parquet_file import MAGIC as PARQUET
from titancli.data.parquet_file import open_parquet, try_parquet, written_out
from titancli.errors import EnvironmentProblem
from titancli.files import NotRegular, read_bytes, read_json, regular
from titancli.fingerprint import cache_folder, cache_name

logger = logging.getLogger(__name__)

CARD, SHEET = "README.md", ".huggingface.yaml"
"""Files with the YAML in which a folder describes itself: at the head of one, all of the other."""
SETTINGS = ("state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json")
SMALL = 1 << 24
"""Bytes of a card, and of a JSON file that describes a dataset."""
PATIENCE = 60.0
"""Seconds in which files are read to find out what they expand to; a terabyte would take hours."""
LINE = 1 << 25
"""Bytes of a line in a compressed file."""
DEEPEST, MOST = 100, 1_000_000
"""Levels of a card's YAML, and its values when each alias is replaced by what it names."""
XZ, BZIP, ZIP, GZIP, ZSTD = b"\xfd7zXZ\0", b"BZh", b"PK\x03\x04", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
UNKNOWN = {b"\x04\x22\x4d\x18": "lz4", b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!": "rar"}
"""Compressions that only the library opens."""


def require_small(path: str, seconds: float | None = None) -> bool:
    """Check that reading a file, or the files of a folder, takes memory and disk by their sizes; return
    whether all were checked.

    A file that was found to be good is not read again unless it changes.

    Args:
        seconds: after which the others are left unread; None: after `PATIENCE`, with a warning.

    Raises:
        EnvironmentProblem: a file is not regular, expands beyond bounds, or is nested too deeply.
    """
    end, unread = time.monotonic() + (PATIENCE if seconds is None else seconds), 0
    try_parquet(_files(path))
    for file in _files(path):
        try:
            unread += not _require_small(file, whole=time.monotonic() < end)
        except NotRegular as error:
            _refuse(file, "it is not a regular file", "remove it from the folder", error)
        except OSError as error:
            _refuse(file, error.strerror or str(error), "restore it, or remove it from the folder", error)
        except (ValueError, RecursionError) as error:
            _refuse(file, str(error), "download it again, or remove it from the folder", error)
    if unread and seconds is None:
        logger.warning(
            "%s: in %.0f s, %d of its compressed files and tables were not read to find out what they expand "
            "to; the library reads them as they are",
            *(path, PATIENCE, unread),
        )
    return not unread


def names_addresses(folder: str) -> bool:
    """Return whether a folder's description of itself names addresses, from which the library would read.

    Raises:
        EnvironmentProblem: it cannot be read, or is nested too deeply.
    """
    for name in (CARD, SHEET):
        path = Path(folder) / name
        try:
            if path.exists() and "://" in _yaml_of(name, read_bytes(path, SMALL)):
                return True
        except OSError as error:
            _refuse(
                str(path), error.strerror or str(error), "restore it, or remove it from the folder", error
            )
    return False


def _refuse(file: str, why: str, hint: str, error: Exception) -> None:
    raise EnvironmentProblem(f"{file} cannot be read: {why}", hint=hint) from error


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
    for folder, below, names in os.walk(path):
        below[:] = [name for name in below if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if name[0] != "." or name == SHEET)


def _require_small(path: str, *, whole: bool) -> bool:
    """Check a file, and return whether that is done; without `whole` it is not if all must be read."""
    with open(path, "rb", opener=regular) as file:
        status = os.fstat(file.fileno())
        head = file.read(8)  # before the search for holes, which moves
        stored = _stored(file.fileno(), status.st_size)
    if status.st_size > (limit := largest(stored)):
        raise OSError(errno.EIO, f"of its {status.st_size:,} bytes only {stored:,} are stored", path)
    name = os.path.basename(path)
    if name in (CARD, SHEET):
        _require_small_yaml(_yaml_of(name, read_bytes(Path(path), SMALL)))
    elif name in SETTINGS:
        read_json(Path(path), SMALL)
    look = next((look for magic, look in _LOOKS.items() if head.startswith(magic)), None)
    if look is None:
        return True
    seen, now = cache_folder() / "bounded" / cache_name(path), f"{status.st_size} {status.st_mtime_ns}"
    with suppress(OSError):
        if read_bytes(seen, 1 << 10).decode(errors="replace") == now:
            return True
    if not whole:
        return False
    look(path, limit)
    with suppress(OSError):  # a cache that cannot be written costs time only
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.write_text(now)
    return True


def _stored(descriptor: int, size: int) -> int:
    """Return the bytes of a file that are not in holes; disks that do not say have none."""
    stored = at = 0
    while at < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            return stored if error.errno == errno.ENXIO else size  # ENXIO: nothing follows but a hole
        at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        stored += at - begin
        if largest(stored) >= size:
            return size
    return stored


def _through(path: str, limit: int, opened: BinaryIO) -> None:
    """Decompress a file, without keeping anything. Only a list of JSON is one long line by nature."""
    total, line, is_list = 0, 0, False
    with opened:
        try:
            while data := opened.read(BLOCK):
                is_list = is_list or (not total and data.lstrip().startswith(b"["))
                if (total := total + len(data)) > limit:
                    raise too_large(path, limit)
                *_, last = data.rpartition(b"\n")
                line = line + len(data) if len(last) == len(data) else len(last)
                if line > LINE and not is_list:
                    raise ValueError(
                        f"a line has more than {LINE:,} bytes; if that is right, decompress it first"
                    )
        except (EOFError, lzma.LZMAError) as error:
            raise ValueError(f"it is damaged: {error}") from error


def _parquet(path: str, limit: int) -> None:
    """Read the columns of a Parquet file whose values may be written out many times."""
    import pyarrow as pa

    try:
        with open_parquet(path) as opened:
            for group in range(opened.metadata.num_row_groups):
                rows = opened.metadata.row_group(group)
                chunks = [rows.column(number) for number in range(rows.num_columns)]
                often = {
                    chunk.path_in_schema.partition(".")[0]
                    for chunk in chunks
                    if chunk.has_dictionary_page and chunk.num_values * chunk.total_uncompressed_size > limit
                }
                for column in sorted(often):
                    if written_out(opened.read_row_group(group, columns=[column])) > limit:
                        raise too_large(path, limit)
    except pa.ArrowException as error:
        raise ValueError(f"it is damaged: {error}") from error


def _zip(path: str, limit: int) -> None:
    try:
        with zipfile.ZipFile(path) as opened:
            if sum(member.file_size for member in opened.infolist()) > limit:
                raise too_large(path, limit)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"it is damaged: {error}") from error


def _unknown(path: str, limit: int) -> None:
    raise ValueError("it is compressed in a way of which titan cannot tell its size: decompress it first")


_LOOKS: dict[bytes, Callable[[str, int], None]] = {
    GZIP: lambda path, limit: _through(path, limit, open_plain(path)),
    ZSTD: lambda path, limit: _through(path, limit, open_plain(path)),
    XZ: lambda path, limit: _through(path, limit, cast(BinaryIO, lzma.open(path))),  # noqa: SIM115
    BZIP: lambda path, limit: _through(path, limit, cast(BinaryIO, bz2.open(path))),  # noqa: SIM115
    ZIP: _zip,
    PARQUET: _parquet,
    **dict.fromkeys(UNKNOWN, _unknown),
}


def _yaml_of(name: str, data: bytes) -> str:
    text = data.decode("utf-8", "replace").lstrip("\ufeff")
    if name == SHEET:
        return text
    return text[3:].partition("\n---")[0] if text.startswith("---") else ""


def _require_small_yaml(text: str) -> None:
    """Check YAML that the library composes, with merges, by calling itself.

    Raises:
        ValueError: it is not YAML, is nested too deeply, or has too many values.
    """
    import yaml

    named: dict[str | None, int] = {}
    """Values by anchor."""
    inside: list[tuple[str | None, int]] = []
    """Of each collection that has not ended: its anchor, and the values before it."""
    values = 0
    loader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, before = inside.pop()
                named[anchor] = values - before
            elif isinstance(event, yaml.NodeEvent):
                values += named.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
                if isinstance(event, yaml.CollectionStartEvent):
                    inside.append((event.anchor, values))
            if len(inside) > DEEPEST:
                raise ValueError(f"its YAML is nested more than {DEEPEST} deep")
            if values > MOST:
                raise ValueError(f"its YAML has more than {MOST:,} values")
    except yaml.YAMLError as error:
        raise ValueError(f"its YAML is damaged: {' '.join(str(error).split())}") from error
