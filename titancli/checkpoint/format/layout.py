"""`metadata.json`: where each tensor's pieces lie. Torch-free.

A checkpoint may come from anywhere, so what is read is checked before anything is allocated or opened: names
of files stay in the folder, pieces lie inside their tensor, cover it, and do not overlap.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
_PRIME = 2**127 - 1
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
    if not tile(shape, chunks):
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


def tile(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Return whether boxes cover a tensor, each element once; in time linear in their number.

    A box is the polynomial of its elements, x^i·y^j summed over all (i, j): times (1-x)(1-y) this is
    (x^start - x^end)(y^start - y^end). The boxes' sum is that of the tensor if and only if they tile it, and
    two different polynomials are hardly ever equal (less than once in 2^50) at a random point.
    """
    point = [secrets.randbelow(_PRIME) for _ in shape]

    @cache
    def power(dim: int, exponent: int) -> int:
        return pow(point[dim], exponent, _PRIME)

    def value(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            product = product * (power(dim, start) - power(dim, start + size)) % _PRIME
        return product

    found = sum(value(chunk.offsets, chunk.shape) for chunk in chunks)
    return found % _PRIME == value([0] * len(shape), shape)
