"""Loading weights of a Hugging Face folder into a model: each rank reads its own part.

If the ranks' parts are interleaved in the file, each reads some rows, and they exchange columns: a fused
projection stores gate and up in pairs (gpt-oss), of which each rank of tensor parallelism holds one half, and
alone each would read both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from titancli.checkpoint.format.columns import Columns, columns_of
from titancli.checkpoint.format.region import Region
from titancli.checkpoint.format.stream import Progress, no_progress
from titancli.checkpoint.format.tensors import TORCH_DTYPE
from titancli.checkpoint.hf.folder import HFReader, read_hf
from titancli.checkpoint.hf.lazy_tensor import Virtual, blocks, put
from titancli.checkpoint.hf.stored import Stored
from titancli.distributed.process_group import patient_group
from titancli.distributed.together import Ranks
from titancli.protocols import HFForm

WASTE = 1.1
"""Ratio of bytes read to bytes needed above which the ranks read together."""


@torch.no_grad()
def load_hf_weights(
    folder: Path,
    form: HFForm,
    parameters: Mapping[str, Tensor],
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    share: tuple[int, int] = (0, 1),
    together: bool = False,
    progress: Progress = no_progress,
) -> str:
    """Fill parameters in place, one tensor at a time; each rank reads its own part of it.

    Values are cast to the parameters' dtypes. `shapes` are those of the whole model, of which `parameters`
    may be a part. `share`: see `HFReader.check`. Ranks do not communicate unless all of them call this with
    `together`: then those whose parts are interleaved in a file read less, see above.

    Raises:
        EnvironmentProblem: the folder does not hold this model; names everything that is wrong.

    Returns:
        A value that is equal on all ranks that see the same files: see `HFReader.identity`.
    """
    own = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    found: list[HFReader] = []

    def opened() -> str:
        found.append(read_hf(folder, form))
        found[0].check(own if shapes is None else shapes, share)
        return f"{found[0].identity} {xxhash.xxh3_128_hexdigest(repr(own).encode())}"

    filled = set()
    if together:
        alike = Ranks(patient_group()).allgather_call(f"loading {folder}", opened)
        filled = _fill_together(parameters, found[0], alike)
    else:
        opened()
    (reader,) = found
    for done, (name, parameter) in enumerate(parameters.items(), start=1):
        if name not in filled:
            put(parameter, reader.virtual(name))
        progress(name, done, len(parameters))
    return reader.identity


def _fill_together(parameters: Mapping[str, Tensor], reader: HFReader, alike: Sequence[str]) -> set[str]:
    """Fill the parameters that are better read together, and return their names; collective.

    Args:
        alike: for each rank, a value that is equal on ranks that load the same from the same folder.

    Raises:
        EnvironmentProblem: a file cannot be read; raised on this rank alone, after all ranks have what
            they wait for.
    """
    filled, failures = set(), list[Exception]()
    for name, parameter in sorted(parameters.items()):
        columns = columns_of(parameter, alike)
        if columns is None or _waste(reader, name, columns) <= WASTE:
            continue
        whole = reader.virtual(name)
        columns.exchange(partial(_rows, whole, columns, failures), whole.dtype, parameter, patient_group())
        filled.add(name)
    if failures:
        raise failures[0]
    return filled


def _waste(reader: HFReader, name: str, columns: Columns) -> float:
    """Return the ratio of bytes read to bytes needed by the first rank; equal on all of them."""
    count = 0

    def unread(place: Stored) -> Virtual:
        def read(region: Region) -> Tensor:
            nonlocal count
            count += place.bytes_read(region)
            return torch.empty([len(r) for r in region], dtype=TORCH_DTYPE[place.dtype])

        return Virtual.of(place.shape, TORCH_DTYPE[place.dtype], read)

    stored = [place for place in reader.sources(name) if isinstance(place, Stored)]
    if len(stored) < len(reader.sources(name)):
        return 1.0  # quantized: neighbours share scales, and are stored together
    try:
        whole = reader.form.from_hf(name, [unread(place) for place in stored])
    except RuntimeError:  # the form needs values, see `HFReader.virtual`
        return 1.0
    if not isinstance(whole, Virtual):
        return 1.0
    region = list(_region(columns.box))
    region[columns.dim] = range(*columns.bounds[:2])
    block = next(blocks(whole, tuple(region)))
    whole.read(block)
    return count / (math.prod(map(len, block)) * whole.dtype.itemsize)


def _rows(whole: Any, columns: Columns, failures: list[Exception], low: int, high: int) -> Tensor:
    """Return some of the rows that this rank reads. Failures are kept for later, since the others wait."""
    rows, *others = _region(columns.rows)
    region = (rows[low:high], *others)
    if not failures:
        try:
            return whole.read(region)
        except Exception as error:
            failures.append(error)
    return torch.zeros([len(r) for r in region], dtype=whole.dtype)


def _region(box: tuple[Sequence[int], Sequence[int]]) -> Region:
    return tuple(range(start, start + size) for start, size in zip(*box, strict=True))
