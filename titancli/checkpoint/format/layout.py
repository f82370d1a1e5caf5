"""`metadata.json`: where each tensor's pieces lie. Torch-free.

A checkpoint may come from anywhere, so what is read is checked before anything is allocated or opened: names
of files stay in the folder, pieces lie inside their tensor, cover it, and do not overlap.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from titancli.checkpoint.format.files import read_file
from titancli.checkpoint.format.hashed import CHECKED, Digest
from titancli.checkpoint.format.tensorfile import ITEM_SIZE, natural
from titancli.errors import EnvironmentProblem

METADATA = "metadata.json"
FORMAT = 1
LIMIT = 1 << 32
"""Bytes of `metadata.json`: as many as 8,000 ranks may write."""
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors\Z")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its values lie."""

    offsets: tuple[int, ...]
    """Its first element, one number a dimension."""
    shape: tuple[int, ...]
    file: str
    key: str
    """Its name in that file."""
    checksums: tuple[str, ...] = ()
    """XXH3 of each `hashed.CHECKED` bytes of it; empty: an earlier titan wrote it, and the file has one."""


@dataclass(frozen=True)
class TensorLayout:
    """A whole tensor."""

    dtype: str
    """A key of `tensorfile.ITEM_SIZE`."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """They cover the tensor and do not overlap; none is empty."""


def layout_text(tensors: Mapping[str, TensorLayout]) -> str:
    """What `metadata.json` holds."""
    table = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "chunks": [
                {
                    "offsets": chunk.offsets,
                    "shape": chunk.shape,
                    "file": chunk.file,
                    "key": chunk.key,
                    **({"xxh3_64": chunk.checksums} if chunk.checksums else {}),
                }
                for chunk in tensor.chunks
            ],
        }
        for name, tensor in tensors.items()
    }
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
    return f'{{"format": {FORMAT}, "tensors": {{\n{rows}\n}}}}\n'


def read_layout(folder: Path, digest: Digest | None = None) -> dict[str, TensorLayout]:
    """Read and check a checkpoint's `metadata.json`, and that it is the one of `digest`, if given.

    Raises:
        EnvironmentProblem: it is missing or not what this version writes.
    """
    path = folder / METADATA
    try:
        text = read_file(path, LIMIT)
        if digest is not None and xxhash.xxh3_64(text).hexdigest() != digest.xxh3_64:
            raise EnvironmentProblem(f"{path} is damaged: its checksum does not match")
        data = json.loads(text)
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} is damaged: it is not JSON") from error
    try:
        if data["format"] != FORMAT:
            raise EnvironmentProblem(
                f"{path} has format {data['format']!r}, but this version of titan reads format {FORMAT}",
                hint="use the version of titan that wrote it (manifest.json names it)",
            )
        return {str(name): _tensor(row) for name, row in data["tensors"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnvironmentProblem(f"{path} is malformed: {error}") from error


def _tensor(row: dict[str, Any]) -> TensorLayout:
    dtype, shape = row["dtype"], natural(row["shape"])
    if dtype not in ITEM_SIZE:
        raise ValueError(f"unknown dtype {dtype!r}")
    if len(shape) > 64 or math.prod(size for size in shape if size) >= 2**63:
        raise ValueError("an impossible shape")
    chunks = tuple(_chunk(chunk, shape) for chunk in row["chunks"])
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape) or overlapping(chunks):
        raise ValueError(f"the chunks of a tensor of shape {list(shape)} overlap or leave gaps")
    for chunk in chunks:
        count = -(-math.prod(chunk.shape) * ITEM_SIZE[dtype] // CHECKED)
        if chunk.checksums and len(chunk.checksums) != count:
            raise ValueError(
                f"a chunk of {list(chunk.shape)} has {len(chunk.checksums)} checksums, not {count}"
            )
    return TensorLayout(dtype, shape, chunks)


def _chunk(row: dict[str, Any], shape: tuple[int, ...]) -> Chunk:
    checksums = tuple(row.get("xxh3_64", ()))
    chunk = Chunk(natural(row["offsets"]), natural(row["shape"]), row["file"], row["key"], checksums)
    if not isinstance(chunk.key, str) or not isinstance(chunk.file, str) or not FILE_NAME.match(chunk.file):
        raise ValueError(f"{chunk.file!r} is not the name of a data file")
    if len(chunk.offsets) != len(shape) or len(chunk.shape) != len(shape):
        raise ValueError(f"a chunk of {len(chunk.shape)} dimensions in a tensor of {len(shape)}")
    if any(
        start + size > whole for start, size, whole in zip(chunk.offsets, chunk.shape, shape, strict=True)
    ):
        raise ValueError(f"a chunk at {list(chunk.offsets)} lies outside its tensor of shape {list(shape)}")
    return chunk


def overlapping(chunks: Sequence[Chunk]) -> bool:
    """Whether two boxes share an element: a sweep along the dimension with the most distinct offsets."""
    boxes = [chunk for chunk in chunks if math.prod(chunk.shape)]
    if len(boxes) < 2:
        return False
    if not boxes[0].shape:
        return True
    sweep = max(range(len(boxes[0].shape)), key=lambda d: len({box.offsets[d] for box in boxes}))
    boxes.sort(key=lambda box: box.offsets[sweep])
    active: list[tuple[int, int]] = []  # (end, index) of boxes that the sweep is inside of
    for index, box in enumerate(boxes):
        start = box.offsets[sweep]
        del active[: bisect_right(active, (start, len(boxes)))]
        if any(_meet(box, boxes[other]) for _, other in active):
            return True
        insort(active, (start + box.shape[sweep], index))
    return False


def _meet(a: Chunk, b: Chunk) -> bool:
    return all(
        a.offsets[d] < b.offsets[d] + b.shape[d] and b.offsets[d] < a.offsets[d] + a.shape[d]
        for d in range(len(a.shape))
    )
