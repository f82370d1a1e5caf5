"""Token shards: the folder that `titan data tokenize` writes and `token_shards` reads. Torch-free.

    index.json   the tokenizer, the type of the tokens, and for each shard its counts and checksums
    00000.bin    the tokens of whole documents, little-endian integers, each document with its end marker
    00000.idx    the end of each document in the shard, in tokens: little-endian int64

Both binary files can be memory-mapped. While the folder is being written, it has `progress.json` instead of
`index.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from titancli.data.unchanged import Stamp
from titancli.errors import EnvironmentProblem
from titancli.fingerprint import (
    CHUNK_BYTES,
    SUM_DIGITS,
    chunk_sums,
    file_sums,
    first_difference,
    full_check,
)

INDEX = "index.json"
PROGRESS = "progress.json"
LOCK = "tokenize.lock"
FORMAT = "titan-token-shards"
VERSION = 1
DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
"""Types of tokens, little-endian, with their sizes in bytes."""
END_BYTES = 8
"""Size of an entry of an `.idx` file."""
INDEX_BYTES = 1 << 28
"""Maximum size of an index: that of 10 terabytes has a few million bytes."""
MAX_COUNT = 1 << 53
"""Exclusive upper bound of the counts in an index."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\Z")
"""Names of shards: files of the folder, with names that every file system accepts."""
_SUMS = re.compile(rf"([0-9a-f]{{{SUM_DIGITS}}})*\Z")


@dataclass(frozen=True)
class Shard:
    """Entry of a shard in the index."""

    name: str
    tokens: int
    documents: int
    max_id: int
    sums: tuple[str, str]
    """xxh3-64 of each 64 MiB of the `.bin` file and of the `.idx` file."""
    modified: tuple[int, int]
    """Times of the last writes to both, in nanoseconds."""


@dataclass(frozen=True)
class Index:
    """Content of `index.json`."""

    folder: Path
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: int
    eos_id: int
    dtype: str
    sources: list[dict[str, Any]]
    """Tokenized sources: labels and identities."""
    skipped: int
    """Number of bad rows that were skipped."""
    shards: list[Shard]
    bos_id: int | None = None
    """First token of each document; None: there is none."""

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def digest(self) -> str:
        """Return a digest of all tokens and document ends, in order."""
        digest = xxhash.xxh3_128(f"{self.dtype}\0{self.eos_id}\0".encode())
        for shard in self.shards:
            digest.update(f"{shard.tokens}\0{shard.documents}\0{shard.sums[0]}\0{shard.sums[1]}\0".encode())
        return f"merkle:{digest.hexdigest()}"

    def facts(self) -> dict[str, Any]:
        """Return the description of the shards for JSON output."""
        return {
            "path": str(self.folder),
            "tokens": self.tokens,
            "documents": self.documents,
            "shards": len(self.shards),
            "dtype": self.dtype,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "bos_id": self.bos_id,
            "skipped": self.skipped,
            "sources": self.sources,
            "digest": self.digest,
        }

    def files(self, shard: Shard) -> tuple[tuple[Path, int], tuple[Path, int]]:
        """Return both files of a shard, each with its expected size in bytes."""
        data, ends = (self.folder / f"{shard.name}{suffix}" for suffix in (".bin", ".idx"))
        return (data, shard.tokens * DTYPES[self.dtype]), (ends, shard.documents * END_BYTES)

    def text(self) -> str:
        """Return the content of the file."""
        fields = asdict(self)
        del fields["folder"]
        if self.bos_id is None:
            del fields["bos_id"]
        return json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=1)


def read_index(folder: Path) -> Index:
    """Return the index of a folder of token shards.

    Raises:
        EnvironmentProblem: there is no index, it is unfinished, or it is invalid or of another version.
    """
    path = folder / INDEX
    if not path.is_file():
        if (folder / PROGRESS).is_file():
            raise EnvironmentProblem(
                f"the token shards in {folder} are not complete",
                hint="the same `titan data tokenize` command continues where it stopped",
            )
        raise EnvironmentProblem(
            f"{folder} has no token shards: there is no {INDEX}"
            if folder.is_dir()
            else f"{folder} is a file, not a folder of token shards"
            if folder.exists()
            else f"{folder} does not exist",
            hint="write them with `titan data tokenize SOURCE... OUT`, or set `format` if another tool did",
        )
    try:
        if path.stat().st_size > INDEX_BYTES:
            raise ValueError(f"it has more than {INDEX_BYTES:,} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found.pop("format"), found.pop("version")) != (FORMAT, VERSION) or found["dtype"] not in DTYPES:
            raise ValueError(f"it is not {FORMAT} of version {VERSION} with a known dtype")
        shards = [
            Shard(**{**shard, "sums": tuple(shard["sums"]), "modified": tuple(shard["modified"])})
            for shard in found.pop("shards")
        ]
        index = Index(folder, shards=shards, **found)
        _check(index)
        return index
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise EnvironmentProblem(
            f"{path} cannot be read: {reason}", hint="restore the file, or tokenize the data again"
        ) from error


def _check(index: Index) -> None:
    """Validate an index from an untrusted source: its names decide which files are read and, in the cache,
    written.

    Raises:
        ValueError: a field is invalid.
    """
    if not isinstance(index.tokenizer, str) or not isinstance(index.sources, list) or not index.shards:
        raise ValueError("it lacks its tokenizer, sources or shards")
    for field in ("vocab_size", "eos_id", "skipped", *(() if index.bos_id is None else ("bos_id",))):
        _check_count(field, getattr(index, field))
    seen: set[str] = set()
    for shard in index.shards:
        name = shard.name
        if not isinstance(name, str) or not _NAME.match(name):
            raise ValueError(f"{str(name)[:80]!r} is not a valid shard name: it could be a file elsewhere")
        if name.casefold() in seen:
            raise ValueError(f"two shards have the name {name!r}")
        seen.add(name.casefold())
        for field in ("tokens", "documents", "max_id"):
            _check_count(f"{field} of shard {name}", getattr(shard, field))
        if not all(isinstance(time, int) for time in shard.modified):
            raise ValueError(f"the times of shard {name} are not numbers")
        for sums, (path, size) in zip(shard.sums, index.files(shard), strict=True):
            if not isinstance(sums, str) or not _SUMS.match(sums):
                raise ValueError(f"the checksums of {path.name} are malformed")
            if len(sums) != SUM_DIGITS * -(-size // CHUNK_BYTES):
                raise ValueError(f"the checksums of {path.name} do not match {size:,} bytes")
    if max(index.tokens, index.documents) >= MAX_COUNT:
        raise ValueError("its counts are implausibly large")


def _check_count(what: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_COUNT:
        raise ValueError(f"{what} is {str(value)[:80]!r}, not a count")


def faults(index: Index, *, whole: bool = False, stamps: dict[str, Stamp] | None = None) -> Iterator[str]:
    """Yield a message for each fault in the files of an index, with path and byte.

    Sizes are always compared. Contents are checked by cached checksums (`chunk_sums`) where a file was
    rewritten or copied; with `whole`, all files are read from disk. `stamps` is filled with the files' stamps
    from before the check.
    """
    for shard in index.shards:
        for (path, size), sums, modified in zip(index.files(shard), shard.sums, shard.modified, strict=True):
            try:
                now = Stamp.of(str(path))
                if stamps is not None:
                    stamps[str(path)] = now
                if now.size != size:
                    yield wrong_size(path, size, now.size)
                elif whole or now.modified != modified:
                    found = file_sums(str(path)) if whole else chunk_sums(str(path))
                    if found != sums:
                        byte = first_difference(sums, found)
                        yield f"{path}: the data differ from {INDEX} from byte {byte:,} on"
            except OSError as error:
                yield f"{path} cannot be read: {error.strerror or error}"


def wrong_size(path: Path | str, size: int, found: int) -> str:
    """Return the message for a file that should have `size` bytes."""
    if found < size:
        return f"{path} is truncated at byte {found:,}: {INDEX} says {size:,} bytes"
    return f"{path} has {found:,} bytes, but {INDEX} says {size:,}: it ends at byte {size:,}"


def require_sound(index: Index) -> dict[str, Stamp]:
    """Check the files of an index as `faults` does; return their stamps by path.

    Raises:
        EnvironmentProblem: a file does not match the index.
    """
    stamps: dict[str, Stamp] = {}
    if fault := next(faults(index, whole=full_check() is not None, stamps=stamps), None):
        raise EnvironmentProblem(
            f"token shards: {fault}",
            hint=f"restore the file, or tokenize again; `titan data verify {index.folder}` checks all files",
        )
    return stamps
