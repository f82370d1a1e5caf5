"""Read files as their libraries do, within limits: run as a script by `titancli.data.trial`.

Imports nothing of titan, so that it starts at once.
"""

from __future__ import annotations

import os
import resource
import sys

SECONDS = 60
"""CPU-seconds for a file; the largest vocabularies take about 3."""
BASE, FOLD = 1 << 30, 64
"""Bytes of memory: so many, and so many times the bytes that are parsed."""
TEXT = "The quick brown fox, 1234 + 5 = naïve 東京 😀\n\tif aaaaaaaa: # " + "x" * 64
PANIC = 3
"""Exit code if the library panics."""


def tokenizer(path: str) -> None:
    """Load a tokenizer.json and use it once."""
    _limit(os.path.getsize(path))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for special in (True, False):
        tokenizer.encode_special_tokens = special
        tokenizer.decode(tokenizer.encode(TEXT).ids)


def parquet(path: str) -> None:
    """Read all that the footer of a Parquet file says: pyarrow aborts at columns that contradict their
    types."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        _limit(int.from_bytes(file.read(4), "little"))
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as opened:
        columns = range(opened.metadata.num_columns)
        for group in map(opened.metadata.row_group, range(opened.metadata.num_row_groups)):
            for number in columns:
                group.column(number)
        for number in columns:
            opened.schema.column(number).logical_type  # noqa: B018 - it is computed
        opened.schema_arrow  # noqa: B018


def _limit(size: int) -> None:
    """Limit what parsing so many bytes may take from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + SECONDS
    for limit, value in (("CORE", 0), ("CPU", seconds), ("DATA", BASE + FOLD * size)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (value, resource.RLIM_INFINITY))


def main(kind: str) -> int:
    """Read the files that stdin names, with a byte on stdout for each that the process survives; an error
    that the library reports itself is for the caller."""
    survived = os.dup(1)
    os.dup2(2, 1)
    for path in sys.stdin.buffer.read().split(b"\0"):
        try:
            globals()[kind](os.fsdecode(path))
        except (ImportError, MemoryError):
            raise
        except Exception:
            pass
        except BaseException as error:  # a panic of a library in Rust is no Exception
            print(error, file=sys.stderr)
            return PANIC
        os.write(survived, b".")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
