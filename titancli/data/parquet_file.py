"""Parquet files that anybody may have written, opened so that a small one takes little memory."""

from __future__ import annotations

import os
from typing import Any

from titancli.data.compressed import largest, too_large
from titancli.files import regular


def open_parquet(path: str) -> Any:
    """Open a Parquet file whose texts are read as they are stored: each once, however many rows have it.

    Raises:
        OSError: it cannot be read, or a column of a row group expands to more than a file of this size may.
        ArrowException: it is damaged.
    """
    import pyarrow.parquet as pq

    with open(path, "rb", opener=regular) as file:
        limit = largest(os.fstat(file.fileno()).st_size)
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
