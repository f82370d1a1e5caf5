"""Where the pieces of a tensor lie, as rows of JSON. Torch-free.

Checkpoints are untrusted, so everything is checked before memory is allocated or a file is opened: file names
stay in the folder, and pieces lie inside their tensor, cover it and do not overlap.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from titancli.checkpoint.format.tensorfile import ITEM_SIZE, natural

_PRIME = 2**127 - 1
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors\Z")


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Part of a tensor: the index of its first element, and its size, one number per dimension each."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its values are stored."""

    offsets: tuple[int, ...]
    """The index of its first element, one number per dimension."""
    shape: tuple[int, ...]
    file: str
    key: str
    """The name of its entry in that file."""
    checksums: tuple[str, ...]
    """XXH3 of each `piece` bytes."""
    piece: int
    start: int
    """Offset of its first byte in the file."""


@dataclass(frozen=True)
class TensorLayout:
    """The layout of a whole tensor."""

    dtype: str
    """A key of `tensorfile.ITEM_SIZE`."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """Non-empty chunks that do not overlap and together cover the tensor, or the requested boxes of it."""


def described(row: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape of a row.

    Raises:
        KeyError, TypeError, ValueError: it is malformed.
    """
    dtype, shape = row["dtype"], natural(row["shape"])
    if dtype not in ITEM_SIZE:
        raise ValueError(f"unknown dtype {dtype!r}")
    if len(shape) > 64 or math.prod(size for size in shape if size) >= 2**63:
        raise ValueError("an impossible shape")
    return dtype, shape


def chunk_from(row: dict[str, Any], dtype: str, shape: tuple[int, ...], *, piece: int) -> Chunk:
    """Return the chunk of a tensor that a row describes.

    Raises:
        KeyError, TypeError, ValueError: it is malformed.
    """
    checksums, start = tuple(row["xxh3_64"]), row["start"]
    place = (natural(row["offsets"]), natural(row["shape"]), row["file"], row["key"])
    chunk = Chunk(*place, checksums, piece, start)
    count = -(-math.prod(chunk.shape) * ITEM_SIZE[dtype] // piece)
    if len(checksums) != count:
        raise ValueError(f"a chunk of {list(chunk.shape)} has {len(checksums)} checksums, not {count}")
    if type(start) is not int or start < 0:
        raise ValueError(f"a chunk starts at {start!r}")
    if not isinstance(chunk.key, str) or not isinstance(chunk.file, str) or not FILE_NAME.match(chunk.file):
        raise ValueError(f"{chunk.file!r} is not the name of a data file")
    if len(chunk.offsets) != len(shape) or len(chunk.shape) != len(shape):
        raise ValueError(f"a chunk of {len(chunk.shape)} dimensions in a tensor of {len(shape)}")
    if any(
        start + size > whole for start, size, whole in zip(chunk.offsets, chunk.shape, shape, strict=True)
    ):
        raise ValueError(f"a chunk at {list(chunk.offsets)} lies outside its tensor of shape {list(shape)}")
    return chunk


def common(offsets: Sequence[int], sizes: Sequence[int], box: Box) -> Box | None:
    """Return the intersection with a box, in the box's coordinates; None: it is empty."""
    start, size = [], []
    for low, length, first, count in zip(offsets, sizes, *box, strict=True):
        begin, end = max(low, first), min(low + length, first + count)
        if begin >= end:
            return None
        start.append(begin - first)
        size.append(end - begin)
    return tuple(start), tuple(size)


def tile(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Return whether boxes cover a tensor, each element exactly once, in time linear in their number.

    A box is the polynomial of its elements, x^i·y^j summed over all (i, j): times (1-x)(1-y) this is (x^start
    - x^end)(y^start - y^end). The boxes' sum equals the tensor's polynomial if and only if they tile it, and
    two different polynomials are almost never equal (less than once in 2^50) at a random point.
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

    found = sum(value(offsets, sizes) for offsets, sizes in boxes)
    return found % _PRIME == value([0] * len(shape), shape)
