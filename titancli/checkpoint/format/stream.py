"""Tensors from their source to the files that they go into, one at a time, cast in blocks.

What needs no cast is written out of the mapped source file, without a copy in this process.
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
"""Callback that receives a name, the number of tensors done, and the total."""

BLOCK = 1 << 22
"""Bytes that are cast at a time."""

CASTS = 3
"""Blocks that are cast while others are written: on two cores this keeps the disk busy."""

FLOAT16_END = 65520.0
"""From here on float16 rounds to infinity."""


def no_progress(name: str, done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Job:
    """One tensor of the source, and the entries that are written from it."""

    name: str
    entries: tuple[Entry, ...]
    read: Callable[[], Sequence[Tensor]]
    """Returns one tensor per entry, of its shape; cast to the entry's dtype as it is written."""


@dataclass(frozen=True)
class Written:
    """A file, and its contents."""

    name: str
    entries: tuple[Entry, ...]
    header: Digest
    digest: Digest
    checksums: list[tuple[str, ...]]
    """Checksums of each entry's pieces, see `tensorfile.TensorFileWriter.checksums`."""


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

    `name(i, n)` names the i-th of n files, from 0. Memory holds one source tensor, as far as its `read`
    allocates any, and one block.

    Raises:
        OSError: the disk refuses.
        TitanError: a job's tensors do not match its entries, or the dtype cannot hold a value.
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
    for _ in values:  # trailing jobs without entries
        raise TitanError("more tensors were read than announced")
    return files


def _values(jobs: Sequence[Job], progress: Progress) -> Iterator[Tensor]:
    for done, job in enumerate(jobs, start=1):
        values = job.read()
        if [tuple(value.shape) for value in values] != [entry.shape for entry in job.entries]:
            raise TitanError(f"the conversion of {job.name} depends on its values and not only on its shape")
        yield from values
        del values  # frees this one before the next is read
        progress(job.name, done, len(jobs))


def _blocks(entry: Entry, tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes as an entry needs them: as stored, or in blocks that are cast or made
    contiguous."""
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
            for part in islice(parts, 1):  # what was written makes room for the next
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
        # Otherwise there is a NaN or an infinity, which float16 can hold too.
        lost = block.isinf() & values.isfinite()
        if lost.any():
            raise TitanError(
                f"{key} has a value of {float(values[lost][0]):.3g}; the largest value of float16 is 65504",
                hint="use bfloat16, which can represent it",
            )
    return block
