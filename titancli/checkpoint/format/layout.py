"""Where the pieces of a tensor lie, as rows of JSON. Torch-free.

A checkpoint may come from anywhere, so what is read is checked before anything is allocated or opened: names
of files stay in the folder, pieces lie inside their tensor, cover it, and do not overlap.
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
"""A part of a tensor: its first element, and its size, one number a dimension each."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its values lie."""

    offsets: tuple[int, ...]
    """Its first element, one number a dimension."""
    shape: tuple[int, ...]
    file: str
    key: str
    """Its name in that file."""
    checksums: tuple[str, ...]
    """XXH3 of each `piece` bytes of it."""
    piece: int
    start: int
    """Where its bytes begin in the file."""


@dataclass(frozen=True)
class TensorLayout:
    """A whole tensor."""

    dtype: str
    """A key of `tensorfile.ITEM_SIZE`."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """They cover the tensor, or the boxes of it that were asked for, and do not overlap; none is empty."""


def described(row: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return a row's dtype and shape.

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
    """Return a chunk of a tensor from its row.

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
    """Return what a box has in common with another one, in the other's own coordinates; None: nothing."""
    start, size = [], []
    for low, length, first, count in zip(offsets, sizes, *box, strict=True):
        begin, end = max(low, first), min(low + length, first + count)
        if begin >= end:
            return None
        start.append(begin - first)
        size.append(end - begin)
    return tuple(start), tuple(size)


def tile(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
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

    found = sum(value(offsets, sizes) for offsets, sizes in boxes)
    return found % _PRIME == value([0] * len(shape), shape)
