"""Detect the format of a file by its content; used wherever documents are read from disk. Torch-free.

A new format needs an entry in `READ`, its detection here, and a source in `titancli.data.shards.sources`.
"""

from __future__ import annotations

import codecs
import csv
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import BinaryIO, NamedTuple

from titancli.data.compressed import SUFFIXES, compression_of, open_plain, unreadable
from titancli.errors import EnvironmentProblem
from titancli.files import regular

logger = logging.getLogger(__name__)

READ = {
    "text": "text",
    "jsonl": "JSON Lines",
    "json": "a list in JSON",
    "csv": "a table of separated values",
    "parquet": "Parquet",
}
"""Formats of documents: as users write them, and as messages name them."""
ROWS = (".jsonl", ".ndjson")
TEXT = (".txt", ".text", ".md", ".rst")
"""Suffixes of files that are read as one text, whatever they look like."""
TABLES = (".csv", ".tsv")
BINARY = (".bin", ".idx", ".npy", ".npz", ".pt")
MAGIC = {
    b"PAR1": "compressed Parquet",
    b"ARROW1": "an Arrow file",
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a ZIP archive",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ\0": "compressed by xz",
}
HEAD_BYTES = 64 << 10
ROW_BYTES = 8 << 20
"""Maximum length of a first row whose end is looked for."""
SAMPLED_ROWS = 16
"""Rows of a file that are looked at; most of them must be JSON objects."""
_OBJECT = re.compile(rb'\s*\{\s*"')
_LIST = re.compile(rb'\s*\[\s*\{\s*"')


ANYHOW = '; to read files as text, whatever they contain: dataset.format = "text"'


class _Other(NamedTuple):
    """A format that is not read, and what to do about it."""

    what: str
    hint: str


class Format(NamedTuple):
    name: str
    """A key of `READ`."""
    by_suffix: bool = False
    """Whether it is read as text because of its suffix, although its rows are JSON objects."""


def format_of(path: str, *, text_anyhow: bool = True) -> Format:
    """Return the format that a file is read as.

    Args:
        text_anyhow: whether the user can choose to read any file as text, which the hint then says.

    Raises:
        EnvironmentProblem: documents cannot be read from its format, it cannot be read, or the package that
            decompresses it is not installed.
    """
    try:
        found = _format(path)
    except OSError as error:
        unreadable(path, error)
    if isinstance(found, Format):
        return found
    raise EnvironmentProblem(
        f"{path} is {found.what}, not text, JSON Lines, a list in JSON, CSV (each also compressed by gzip or "
        f"zstd) or Parquet",
        hint=found.hint + (ANYHOW if text_anyhow else ""),
    )


def formats_of(paths: Iterable[str], *, text_anyhow: bool = True) -> list[str]:
    """Return the formats of files; warn about JSON Lines that are read as text because of their suffix."""
    names, odd = [], []
    for path in paths:
        found = format_of(path, text_anyhow=text_anyhow)
        names.append(found.name)
        odd += [path] if found.by_suffix else []
    if odd and text_anyhow:
        more = f" (and {len(odd) - 1:,} more)" if len(odd) > 1 else ""
        logger.warning("%s%s looks like JSON Lines, but its suffix makes it one text", odd[0], more)
    return names


def require_text(paths: Sequence[str]) -> None:
    """Check that all files are text.

    Raises:
        EnvironmentProblem: a file has another format.
    """
    for path, found in zip(paths, formats_of(paths), strict=True):
        refuse_rows(path, found)


def refuse_rows(path: str, found: str) -> None:
    """
    Raises:
        EnvironmentProblem: a file of this format is not text.
    """
    if found != "text":
        raise EnvironmentProblem(
            f"{path} holds {READ[found]}, and would be read as one text",
            hint=f'use dataset.type = "{"parquet" if found == "parquet" else "jsonl"}" for it{ANYHOW}',
        )


def kind_of_rows(path: str) -> str:
    """Return the format that a file of rows is read as; a table is known by its lines, under any name.

    Raises:
        EnvironmentProblem: rows cannot be read from its format, or it cannot be read.
    """
    found = format_of(path, text_anyhow=False)
    if found.name != "text" or found.by_suffix:
        return "jsonl" if found.by_suffix else found.name
    with open_plain(path) as file:
        head = _head(file).decode(errors="replace").splitlines()[: SAMPLED_ROWS + 1]
    if len(head) < 2:
        return "text"
    widths = {len(cells) for cells in csv.reader(head, delimiter=delimiter_of(head[0]))}
    return "csv" if len(widths) == 1 and max(widths) > 1 else "text"


def delimiter_of(header: str) -> str:
    """Return what separates the values of a table, by its first line."""
    return max((",", "\t", ";"), key=header.count)


def _format(path: str) -> Format | _Other:
    plain, suffix = os.path.splitext(path.lower())
    with open(path, "rb", opener=regular) as file:
        begin = file.peek(4)
        if not begin:
            return Format("jsonl" if suffix in ROWS else "csv" if suffix in TABLES else "text")
        compressed = suffix in SUFFIXES or compression_of(begin) is not None
        with open_plain(path) if compressed else nullcontext(file) as plainly:
            head = _head(plainly)
    if compressed:
        suffix = os.path.splitext(plain)[1] if suffix in SUFFIXES else suffix
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _Other("in UTF-16", "convert it: `iconv -f UTF-16 -t UTF-8`")
    says_text = suffix in TEXT and not compressed
    rows = _are_objects(head)
    # A NUL makes a row of JSON Lines bad, not the file binary.
    binary = b"\0" in head and (says_text or not rows)
    if binary or not says_text:
        if (head.startswith(b"PAR1") or suffix == ".parquet") and not compressed:
            return Format("parquet")
        what = next((what for magic, what in MAGIC.items() if head.startswith(magic)), None)
        if what is not None or suffix in BINARY or binary:
            return _Other(what or "binary data", "leave it out, as in 'corpus/**/*.jsonl'")
    if says_text:
        return Format("text", by_suffix=rows)
    if rows or (suffix in ROWS and not _LIST.match(head)):
        return Format("jsonl")
    if suffix in (".json", *ROWS) or (not suffix and (_OBJECT.match(head) or _LIST.match(head))):
        if _LIST.match(head):
            return Format("json")
        return _Other("JSON that is neither one object a line nor a list of objects", "convert it: `jq -c`")
    return Format("csv" if suffix in TABLES else "text")


def _head(file: BinaryIO) -> bytes:
    """Return the beginning of a file: whole rows, if the first one ends within 8 MiB."""
    head = file.read(HEAD_BYTES)
    if _OBJECT.match(head.removeprefix(codecs.BOM_UTF8)) and b"\n" not in head:
        head += file.read(ROW_BYTES - len(head))
    if file.read(1):  # drop the incomplete last row
        head = head[: head.rfind(b"\n") + 1] or head
    return head.removeprefix(codecs.BOM_UTF8)


def _are_objects(head: bytes) -> bool:
    """Return whether most rows are JSON objects, of those without a NUL: one of those is a bad row."""
    rows = [row for row in head.split(b"\n") if row.strip() and b"\0" not in row][:SAMPLED_ROWS]
    objects = sum(bool(_OBJECT.match(row)) and _is_object(row) for row in rows)
    return 2 * objects > len(rows)


def _is_object(row: bytes) -> bool:
    if len(row) >= ROW_BYTES - len(codecs.BOM_UTF8):  # a byte order mark may have been before it
        return True  # too long to be checked
    try:
        return isinstance(json.loads(row), dict)
    except (ValueError, RecursionError):
        return False
