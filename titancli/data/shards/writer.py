"""Writes token shards such that an interrupted job can continue and leaves the same bytes. Torch-free."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, cast

import numpy as np

from titancli.data.shards import DTYPES, END_BYTES, Shard
from titancli.errors import EnvironmentProblem
from titancli.fingerprint import CHUNK_BYTES, SUM_DIGITS, ChunkSums


class _File:
    """A file that only grows, with the checksums of its content."""

    def __init__(self, path: Path, size: int = 0, sums: str = "") -> None:
        """Open the file; its first `size` bytes exist, with these checksums of whole chunks, and any rest
        is dropped."""
        found = path.stat().st_size if size and path.exists() else 0
        if found < size:  # truncating to more than its size would add zeros
            raise EnvironmentProblem(
                f"{path} has only {found:,} bytes of the {size:,} that were written",
                hint="remove the folder and tokenize the data again",
            )
        opened = open(path, "r+b" if size else "w+b", buffering=1 << 20)  # noqa: SIM115
        self._file = cast(io.BufferedRandom, opened)
        self._file.truncate(size)
        self.sums = ChunkSums(sums)
        self._file.seek(len(sums) // SUM_DIGITS * CHUNK_BYTES)
        while data := self._file.read(1 << 20):
            self.sums.update(data)

    def write(self, data: np.ndarray) -> None:
        view = data.data.cast("B")
        self._file.write(view)
        self.sums.update(view)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close without flushing: if the disk is full, writing the rest would fail again."""
        self._file.raw.close()

    def finish(self) -> tuple[str, int]:
        """Close the file; return its checksums, and the time of its last write."""
        self.sync()
        modified = os.fstat(self._file.fileno()).st_mtime_ns
        self.close()
        return self.sums.all, modified


class ShardWriter:
    """Appends documents to the shards of a folder; a shard ends with the document that fills it.

    Raises:
        EnvironmentProblem: the folder does not match `state`.
    """

    def __init__(
        self, folder: Path, dtype: str, shard_tokens: int, state: dict[str, Any] | None = None
    ) -> None:
        """Create the writer; with `state`, continue from there (see `commit`)."""
        state = state or {"shards": [], "open": None}
        self._folder, self._dtype, self._shard_tokens = (
            folder,
            np.dtype(dtype).newbyteorder("<"),
            shard_tokens,
        )
        self.shards = [Shard(**shard) for shard in state["shards"]]
        self._files: tuple[_File, _File] | None = None
        self._tokens = self._documents = self._max_id = 0
        if state["open"] is not None:
            self._open(**state["open"])

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards) + self._tokens

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards) + self._documents

    def _open(
        self, tokens: int = 0, documents: int = 0, max_id: int = 0, sums: tuple[str, str] = ("", "")
    ) -> tuple[_File, _File]:
        base = self._folder / f"{len(self.shards):05d}"
        self._tokens, self._documents, self._max_id = tokens, documents, max_id
        self._files = (
            _File(base.with_suffix(".bin"), tokens * DTYPES[self._dtype.name], sums[0]),
            _File(base.with_suffix(".idx"), documents * END_BYTES, sums[1]),
        )
        return self._files

    def add(self, tokens: np.ndarray, *, ends: bool) -> None:
        """Append the tokens of a document or of a piece; `ends` if the document ends with it."""
        data, index = self._files or self._open()
        data.write(np.ascontiguousarray(tokens, self._dtype))
        self._tokens += len(tokens)
        self._max_id = max(self._max_id, int(tokens.max()))
        if ends:
            self._documents += 1
            index.write(np.array([self._tokens], "<i8"))
            if self._tokens >= self._shard_tokens:
                self.finish_shard()

    def finish_shard(self) -> None:
        """Finish the current shard, if there is one."""
        if self._files is None:
            return
        (data, at), (index, when) = (file.finish() for file in self._files)
        name = f"{len(self.shards):05d}"
        shard = Shard(name, self._tokens, self._documents, self._max_id, (data, index), (at, when))
        self.shards.append(shard)
        self._files, self._tokens, self._documents, self._max_id = None, 0, 0, 0

    def commit(self) -> dict[str, Any]:
        """Flush everything to disk, and return the state to continue from: plain JSON."""
        going = None
        if self._files is not None:
            for file in self._files:
                file.sync()
            sums = [file.sums.whole for file in self._files]
            going = {
                "tokens": self._tokens,
                "documents": self._documents,
                "max_id": self._max_id,
                "sums": sums,
            }
        return {"shards": [vars(shard) for shard in self.shards], "open": going}

    def close(self) -> None:
        """Close the files as they are; uncommitted data is dropped when the work continues."""
        for file in self._files or ():
            file.close()
