"""Tensors from where they are read to the files that they go into: one at a time, cast in blocks beside it.

What is stored as it was read is written out of the mapped source file, without a copy in this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from titancli.checkpoint.format.tensorfile import Digest, Entry, TensorFileWriter, split
from titancli.checkpoint.format.tensors import TORCH_DTYPE, tensor_bytes
from titancli.errors import TitanError

Progress = Callable[[str, int, int], None]
"""Called with a name, and how many of how many tensors are done."""

BLOCK = 1 << 22
"""Bytes that are cast at a time."""

CASTS = 3
"""Blocks that are cast while others are written: on two cores the disk then waits for none."""

FLOAT16_END = 65520.0
"""From here on float16 rounds to infinity."""


def no_progress(name: str, done: int, total: int) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Job:
    """One tensor of the source, and the entries of files that come of it."""

    name: str
    entries: tuple[Entry, ...]
    read: Callable[[], Sequence[Tensor]]
    """One tensor an entry, of its shape; cast to its dtype as it is written."""


@dataclass(frozen=True)
class Written:
    """A file, and what is in it."""

    name: str
    entries: tuple[Entry, ...]
    header: Digest
    digest: Digest
    checksums: list[tuple[str, ...]]
    """Of each entry's pieces, see `tensorfile.TensorFileWriter.checksums`."""


@torch.no_grad()
def write_files(
    folder: Path,
    jobs: Sequence[Job],
    name: Callable[[int, int], str],
    *,
    limit: int | None = None,
    progress: Progress = no_progress,
) -> list[Written]:
    """Write safetensors files of at most `limit` bytes of data (None: `tensorfile.SHARD_BYTES`) each.

    `name(i, n)` names the i-th of n files, from 0. Memory holds one source tensor, as far as its `read` takes
    memory, and one block.

    Raises:
        OSError: the disk says no.
        TitanError: a job gives other tensors than its entries announce, or values that the dtype cannot hold.
    """
    entries = [entry for job in jobs for entry in job.entries]
    parts = split([entry.nbytes for entry in entries], limit)
    values = _values(jobs, progress)
    files = []
    for number, part in enumerate(parts):
        inside = tuple(entries[i] for i in part)
        file_name = name(number, len(parts))
        with TensorFileWriter(folder / file_name, inside) as file:
            for entry in inside:
                file.write_pieces(_blocks(entry, next(values)))
            digest = file.close()
            files.append(Written(file_name, tuple(file.entries), file.header, digest, file.checksums()))
    for _ in values:  # jobs at the end that nothing comes of
        raise TitanError("more tensors were read than announced")
    return files


def _values(jobs: Sequence[Job], progress: Progress) -> Iterator[Tensor]:
    for done, job in enumerate(jobs, start=1):
        values = job.read()
        if [tuple(value.shape) for value in values] != [entry.shape for entry in job.entries]:
            raise TitanError(f"the conversion of {job.name} depends on its values and not only on its shape")
        yield from values
        del values  # the next one is read without this one in memory
        progress(job.name, done, len(jobs))


def _blocks(entry: Entry, tensor: Tensor) -> Iterator[memoryview]:
    """A tensor's bytes as an entry wants them: as they lie, or in blocks that are cast or put in order."""
    dtype = TORCH_DTYPE[entry.dtype]
    if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        raise TitanError(f"{entry.key} is {tensor.dtype}, but was announced as {dtype}")
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
        if tensor.dtype == dtype:
            yield tensor_bytes(tensor)
            return
    if not tensor.numel():
        return
    rows = max(1, BLOCK * len(tensor) // (tensor.numel() * dtype.itemsize))
    parts = iter(tensor.split(rows))
    pending: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(CASTS, thread_name_prefix="titan-cast") as pool:
        for part in islice(parts, CASTS):
            pending.append(pool.submit(_cast, entry.key, part, torch.empty(part.shape, dtype=dtype)))
        while pending:
            block = pending.popleft().result()
            yield tensor_bytes(block)
            for part in islice(parts, 1):  # what was written makes room for one that is to come
                pending.append(pool.submit(_cast, entry.key, part, block[: len(part)]))


def _cast(key: str, values: Tensor, block: Tensor) -> Tensor:
    """Copy values into a block of another dtype, and return it.

    Raises:
        TitanError: they are too large for float16.
    """
    if values.itemsize == block.itemsize == 2 and values.dtype != block.dtype:
        values = values.float()  # by way of float32 torch casts 1.8 times as fast
    block.copy_(values)
    if block.dtype == torch.float16 and values.dtype != torch.float16:
        least, most = (float(value) for value in values.aminmax())
        if least > -FLOAT16_END and most < FLOAT16_END:
            return block
        # Or else there is a NaN or an infinity, which float16 holds too.
        lost = block.isinf() & values.isfinite()
        if lost.any():
            raise TitanError(
                f"{key} has a value of {float(values[lost][0]):.3g}; the largest value of float16 is 65504",
                hint="use bfloat16, which can represent it",
            )
    return block
