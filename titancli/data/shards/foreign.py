"""Token files of other tools, read as they are: Megatron-LM, llm.c (modded-nanogpt), and plain arrays."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from titancli.data import TokenShards
from titancli.data.files import TextFile, corpus_identity, files_of
from titancli.data.shards import DTYPES
from titancli.data.shards.reader import OpenFiles, Part, TokenFiles
from titancli.data.unchanged import Stamp
from titancli.errors import EnvironmentProblem
from titancli.files import regular
from titancli.recipe.find import url_of

MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
LLMC_HEADER = 1024
LLMC = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Type of the tokens by the header's magic number and version."""
EMPTY = 1 << 22
"""Most sequences or documents without a token in a file."""
SAMPLES = 64
"""Documents per file whose end markers are checked."""


class Foreign(NamedTuple):
    """The files of a config, opened and identified."""

    parts: list[Part]
    dtype: str
    documents: MegatronDocuments | None
    """Positions of the documents; None: the files do not mark them."""
    identity: dict[str, Any]
    known: dict[str, Stamp]
    """Stamps of all files."""


def open_foreign(config: TokenShards, label: str) -> Foreign:
    """Open and identify the files of another tool.

    Raises:
        EnvironmentProblem: there are none, or one has another format.
    """
    if far := [url for path in config.paths if (url := url_of(path))]:
        raise EnvironmentProblem(
            f"{label}: files of format {config.format!r} are read from this machine only, not from {far[0]}",
            hint="copy them, or tokenize to shards of titan and upload the folder",
        )
    files = files_of(config.paths)
    if config.format == "megatron":
        files = [file for file in files if not file.path.endswith(".idx")]
    if not files:
        raise EnvironmentProblem(f"{label}: there is no .bin file", hint="correct dataset.paths")
    indexes = [_megatron(file) for file in files] if config.format == "megatron" else []
    found = [(index.part, index.dtype) for index in indexes] or [_plain(config, file) for file in files]
    kinds = {dtype for _, dtype in found}
    if len(kinds) > 1:
        others = ", ".join(sorted(kinds - {found[0][1]}))
        raise EnvironmentProblem(
            f"{label}: {found[0][0].path} holds {found[0][1]}, other files {others}",
            hint="use files with tokens of one type",
        )
    beside = [_beside(file) for file in files] if indexes else []
    identity = corpus_identity(label, [*files, *beside], shuffle=False, seed=0, text=False)
    facts = {"contents": identity["contents"], "format": config.format}
    by_documents = config.shuffle == "documents" or config.packing == "best_fit"
    if by_documents and any(index.documents != index.sequences for index in indexes):
        facts["documents"] = sum(index.documents for index in indexes)  # once a sequence was one
    known = {file.path: file.stamp for file in [*files, *beside]}
    documents = MegatronDocuments(indexes, known) if indexes else None
    return Foreign([part for part, _ in found], kinds.pop(), documents, facts, known)


def _refuse(path: str, byte: int, what: str, config_format: str) -> NoReturn:
    raise EnvironmentProblem(
        f"{path} is not a file of dataset.format = {config_format!r}: {what} (byte {byte:,})",
        hint="set dataset.format to the tool that wrote the file, or restore it",
    )


def _open(path: str) -> BinaryIO:
    """Open a file.

    Raises:
        EnvironmentProblem: it cannot be read, or is not a regular file.
    """
    try:
        return open(path, "rb", opener=regular)
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}", hint="restore the file") from error


def _plain(config: TokenShards, file: TextFile) -> tuple[Part, str]:
    """Read a file of tokens alone, or after the header of llm.c."""
    if config.format == "raw":
        dtype, first, count = str(config.dtype), 0, None
        with _open(file.path) as opened:
            if opened.read(6) == b"\x93NUMPY":
                _refuse(file.path, 0, "it has a header of NumPy; write it with `array.tofile`", "raw")
    else:
        with _open(file.path) as opened:
            header = opened.read(LLMC_HEADER)
        if len(header) < LLMC_HEADER or struct.unpack("<2i", header[:8]) not in LLMC:
            _refuse(file.path, 0, "its header has another magic number or version", "llm.c")
        dtype, first = LLMC[struct.unpack("<2i", header[:8])], LLMC_HEADER
        count = struct.unpack("<i", header[8:12])[0]
    size = file.size - first
    whole, rest = divmod(size, DTYPES[dtype])
    if rest or (count is not None and count != whole):
        wanted = f"{count:,} tokens" if count is not None else "whole tokens"
        _refuse(
            file.path,
            file.size,
            f"{size:,} bytes of {dtype} are not {wanted}: is it truncated?",
            config.format,
        )
    return Part(file.path, whole, first), dtype


class _Megatron(NamedTuple):
    part: Part
    dtype: str
    index_path: str
    """Path of the `.idx` file."""
    sequences: int
    documents: int
    """Each has one sequence or, if preprocessed with `--split-sentences`, several."""

    @property
    def pointers(self) -> int:
        """Return the byte offset of the table of sequence starts, which follows that of their lengths."""
        return MEGATRON_HEADER.size + 4 * self.sequences

    @property
    def table(self) -> int:
        """Return the byte offset of the table of each document's first sequence."""
        return self.pointers + 8 * self.sequences


def _beside(file: TextFile) -> TextFile:
    path = f"{os.path.splitext(file.path)[0]}.idx"
    try:
        return TextFile(path, f"{os.path.splitext(file.name)[0]}.idx", *Stamp.of(path))
    except OSError as error:
        raise EnvironmentProblem(
            f"{file.path} has no index: cannot read {path}: {error.strerror}",
            hint="keep both files that Megatron-LM's preprocess_data.py writes in one folder",
        ) from error


def _megatron(file: TextFile) -> _Megatron:
    """Read an index of Megatron-LM and check it against the file of tokens."""
    index = _beside(file)
    with _open(index.path) as opened:
        header = opened.read(MEGATRON_HEADER.size)
        if len(header) < MEGATRON_HEADER.size:
            _refuse(index.path, len(header), "its header is truncated", "megatron")
        magic, version, code, sequences, documents = MEGATRON_HEADER.unpack(header)
        if magic != MEGATRON_MAGIC or version != 1:
            _refuse(index.path, 0, "its header has another magic number or version", "megatron")
        if code not in MEGATRON_DTYPES:
            _refuse(index.path, 17, f"the code {code} is not a type of tokens", "megatron")
        most = file.size // DTYPES[MEGATRON_DTYPES[code]] + EMPTY
        if max(sequences, documents) > most:
            what = f"it counts {sequences:,} sequences and {documents:,} documents of {most - EMPTY:,} tokens"
            _refuse(index.path, 18, what, "megatron")
        size = MEGATRON_HEADER.size + 12 * sequences + 8 * documents
        if index.size < size:
            _refuse(index.path, index.size, f"{sequences:,} sequences need {size:,} bytes", "megatron")
        dtype = MEGATRON_DTYPES[code]
        found = _Megatron(Part(file.path, 0), dtype, index.path, sequences, max(0, documents - 1))
        tokens = _check_sequences(opened, found)
        _check_documents(opened, found)
    if tokens * DTYPES[dtype] != file.size:
        what = f"its index is of {tokens:,} tokens of {dtype}, {tokens * DTYPES[dtype]:,} bytes"
        _refuse(file.path, file.size, what, "megatron")
    return found._replace(part=Part(file.path, tokens))


def _check_sequences(opened: BinaryIO, index: _Megatron) -> int:
    """Return the number of tokens of all sequences, checking that each begins where the previous one ends."""
    tokens, width = 0, DTYPES[index.dtype]
    for first in range(0, index.sequences, 1 << 20):
        count = min(1 << 20, index.sequences - first)
        lengths = _table(opened, MEGATRON_HEADER.size + 4 * first, count, "<i4")
        if lengths.min() < 0:
            _refuse(index.index_path, MEGATRON_HEADER.size + 4 * first, "a length is negative", "megatron")
        ends = tokens + np.cumsum(lengths, dtype=np.int64)
        pointers = _table(opened, index.pointers + 8 * first, count, "<i8")
        wrong = np.flatnonzero(pointers != (ends - lengths) * width)
        if len(wrong):
            at = index.pointers + 8 * (first + int(wrong[0]))
            _refuse(
                index.index_path, at, "a sequence does not begin where the one before it ends", "megatron"
            )
        tokens = int(ends[-1])
    return tokens


def _check_documents(opened: BinaryIO, index: _Megatron) -> None:
    """Check that the documents cover all sequences in order."""
    last, count = 0, index.documents + 1
    for first in range(0, count, 1 << 20):
        table = _table(opened, index.table + 8 * first, min(1 << 20, count - first), "<i8")
        wrong = np.flatnonzero(np.diff(table, prepend=last if first else 0) < 0)
        if len(wrong) or (first == 0 and table[0] != 0):
            at = index.table + 8 * (first + (int(wrong[0]) if len(wrong) else 0))
            _refuse(index.index_path, at, "its table of documents is not in order", "megatron")
        last = int(table[-1])
    if last != index.sequences:
        what = f"its documents end with sequence {last:,} of {index.sequences:,}"
        _refuse(index.index_path, index.table + 8 * index.documents, what, "megatron")


def _table(opened: BinaryIO, byte: int, count: int, dtype: str) -> np.ndarray:
    opened.seek(byte)
    data = opened.read(count * np.dtype(dtype).itemsize)
    if len(data) < count * np.dtype(dtype).itemsize:
        _refuse(opened.name, byte + len(data), "it is truncated", "megatron")
    return np.frombuffer(data, dtype)


class MegatronDocuments:
    """The bounds of the documents in Megatron-LM's files."""

    def __init__(self, indexes: Sequence[_Megatron], known: Mapping[str, Stamp]) -> None:
        self._indexes = indexes
        self._firsts = np.cumsum([0, *(index.documents for index in indexes)])
        self._tokens = np.cumsum([0, *(index.part.tokens for index in indexes)])
        self._files = OpenFiles(known)

    @property
    def documents(self) -> int:
        return int(self._firsts[-1])

    def bounds(self, documents: np.ndarray) -> np.ndarray:
        """Return the first token of each of some documents, and the one after its last, int64 [n, 2]."""
        found = [self._bounds(document) for document in documents.tolist()]
        return np.array(found, np.int64).reshape(-1, 2)

    def _bounds(self, document: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._firsts, document, side="right")) - 1
        index, at = self._indexes[number], document - int(self._firsts[number])
        sequences = np.zeros(2, "<i8")
        self._files.read(index.index_path, sequences, index.table + 8 * at)
        start, end = (self._start(index, sequence) for sequence in sequences.tolist())
        before = int(self._tokens[number])
        return before + start, before + end

    def _start(self, index: _Megatron, sequence: int) -> int:
        """Return the first token of a sequence in its file; for the index after the last, the number of
        tokens."""
        if sequence == index.sequences:
            return index.part.tokens
        byte = np.zeros(1, "<i8")
        self._files.read(index.index_path, byte, index.pointers + 8 * sequence)
        return int(byte[0]) // DTYPES[index.dtype]

    def require_end_markers(self, tokens: TokenFiles, eos_id: int) -> None:
        """Check the end markers of some documents of each file.

        Raises:
            EnvironmentProblem: a document does not end with the end marker.
        """
        for first, behind, index in zip(self._firsts, self._firsts[1:], self._indexes, strict=False):
            count = min(SAMPLES, int(behind - first))
            for document in np.unique(np.linspace(first, behind - 1, count, dtype=np.int64)):
                start, end = self._bounds(int(document))
                last = np.empty(1, tokens.dtype)
                if end > start:
                    tokens.read(end - 1, last)
                if end > start and last[0] != eos_id:
                    raise EnvironmentProblem(
                        f"{index.part.path}: document {int(document - first):,} ends with the id "
                        f"{int(last[0])}, not with the end marker {eos_id}: documents cannot be kept apart",
                        hint="set dataset.document_mask = false, or preprocess with --append-eod",
                    )


def paths_of(config: TokenShards) -> list[Path]:
    """Return the folders of titan's own format without duplicates; URLs are unchanged."""
    paths = (path if url_of(path) else Path(os.path.abspath(path)) for path in config.paths)
    return list(dict.fromkeys(paths))
