"""Parquet files that anybody may have written, opened so that a small one takes little memory, and that none
ends the process."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import xxhash

from titancli.data.compressed import largest, too_large
from titancli.data.trial import harms_of
from titancli.files import LARGEST, regular

MAGIC = b"PAR1"


def try_parquet(paths: Iterable[str]) -> dict[str, str]:
    """Read the footers of Parquet files in another process, those that are not remembered; return those that
    end it, and how. To try many files at once saves each of them a process of its own.

    Other files, and files that cannot be read, are left out.
    """
    digests: dict[str, str] = {}
    for path in paths:
        with suppress(OSError):
            digests |= _digest(path)
    return harms_of("parquet", "pyarrow", digests)


def require_harmless(path: str) -> None:
    """Check that reading a Parquet file does not end the process.

    Raises:
        OSError: it does, or the file cannot be read.
    """
    for reason in harms_of("parquet", "pyarrow", _digest(path)).values():
        raise OSError(errno.EIO, reason, path)


def _digest(path: str) -> dict[str, str]:
    """Return the digest of a Parquet file's footer, by its path; nothing for another file.

    Raises:
        OSError: it cannot be read, or its footer is too large.
    """
    with open(path, "rb", opener=regular) as file:
        if (size := os.fstat(file.fileno()).st_size) < 12:
            return {}
        file.seek(size - 8)
        end = file.read(8)
        length = int.from_bytes(end[:4], "little")
        if not end.endswith(MAGIC) or length > size - 8:
            return {}
        if length > LARGEST:
            raise OSError(errno.EIO, f"its footer has {length:,} bytes, more than {LARGEST:,}", path)
        file.seek(size - 8 - length)
        return {path: xxhash.xxh3_128_hexdigest(file.read(length))}


def open_parquet(path: str) -> Any:
    """Open a Parquet file whose texts are read as they are stored: each once, however many rows have it.

    Raises:
        OSError: it cannot be read, its footer ends the process that reads it, or a column of a row group
            expands to more than a file of this size may.
        ArrowException: it is damaged.
    """
    import pyarrow.parquet as pq

    require_harmless(path)
    limit = largest(os.path.getsize(path))
    opened = pq.ParquetFile(path)
    groups, columns = range(opened.metadata.num_row_groups), range(opened.metadata.num_columns)
    for chunk in (opened.metadata.row_group(group).column(column) for group in groups for column in columns):
        if max(chunk.total_uncompressed_size, 8 * chunk.num_values) > limit:
            raise too_large(path, limit)
    leaves = [opened.schema.column(number) for number in columns]
    texts = [leaf.path for leaf in leaves if leaf.logical_type.type in ("STRING", "JSON", "ENUM")]
    opened.close()
    return pq.ParquetFile(path, metadata=opened.metadata, read_dictionary=texts)


def written_out(values: Any) -> int:
    """Return the bytes of Arrow values if each text is written as often as it is used."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(values, (pa.Table, pa.RecordBatch)):
        return sum(written_out(column) for column in values.columns)
    if isinstance(values, pa.ChunkedArray):
        return sum(written_out(chunk) for chunk in values.chunks)
    if pa.types.is_dictionary(values.type):
        lengths = pc.binary_length(values.dictionary).cast(pa.int64())
        return (pc.sum(lengths.take(values.indices)).as_py() or 0) + 4 * len(values)
    if pa.types.is_struct(values.type):
        return sum(written_out(field) for field in values.flatten())
    if pa.types.is_map(values.type):
        begin, end = values.offsets[0].as_py(), values.offsets[-1].as_py()
        parts = (part.slice(begin, end - begin) for part in (values.keys, values.items))
        return sum(map(written_out, parts)) + 4 * len(values)
    if pa.types.is_nested(values.type):
        return written_out(values.flatten()) + 4 * len(values)
    return int(values.nbytes)
