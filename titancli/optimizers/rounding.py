"""Stochastic rounding to bfloat16, with random bits that follow from names and places alone.

To nearest, a number that changes by less than half of bfloat16's last digit (0.2 to 0.4 %) does not change at
all, however often: a second moment under beta2 = 0.999 never decays, and a weight under a small learning rate
stands still. Rounded up as often as what is cut off is large, both move as in float32 on average (arXiv
2010.06192). The bits are a hash of (name, step, place in the whole tensor): there is no state to save, no
generator to share, and replicas and other layouts round alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

FIRST, SECOND, THIRD = 0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B1 - 2**32
"""Odd factors, as int32: those of the hash lowbias32 (https://nullprogram.com/blog/2018/07/31), and
2**32 over the golden ratio."""
HALF = 0xFFFF


class Place(NamedTuple):
    """Where the part of a tensor that a rank has lies in the whole."""

    offset: int
    """Of its first number, modulo 2**32, as int32."""
    steps: tuple[int, int, int, int] | None
    """What is needed to find the others, see `indices`; None: they follow one after the other."""


def salt_of(text: str) -> int:
    """A random int32 for a name."""
    return _int32(xxhash.xxh32_intdigest(text.encode()))


def place_of(parameter: Tensor) -> Place:
    """The place of this rank's part of a parameter: a block of it."""
    if not isinstance(parameter, DTensor):
        return Place(0, None)
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from titancli.distributed.private import offsets_of

    whole = parameter.shape
    with unset_fake_temporarily():  # in a dry run too it reads numbers
        starts = offsets_of(parameter)
    # Dimensions that are whole are one with the dimension before them.
    cut: list[tuple[int, int, int]] = []
    for size, part, start in zip(whole, parameter.to_local().shape, starts, strict=True):
        if cut and part == size:
            before = cut.pop()
            cut.append((before[0] * size, before[1] * size, before[2] * size))
        else:
            cut.append((size, part, start))
    (_, _, start2), *outer = reversed(cut or [(1, 1, 0)])
    if not outer:
        return Place(_int32(start2), None)
    (_, part2, _), (size2, *_) = cut[-1], cut[-1]
    (size1, part1, start1), *rest = outer
    start0 = rest[0][2] if rest else 0
    offset = (start0 * size1 + start1) * size2 + start2
    return Place(_int32(offset), (part1, part2, _int32(size1 * size2), _int32(size2)))


def indices(first: int, count: int, offset: Any, steps: Any, device: torch.device) -> Tensor:
    """Of `count` numbers of a rank's part from `first` on, their places in the whole, modulo 2**32.

    Args:
        offset, steps: see `Place`; numbers, or scalars on the device.
    """
    short = torch.int32 if first + count < 2**31 else torch.int64
    here = torch.arange(first, first + count, dtype=short, device=device)
    if steps is not None:
        rows, columns, block, row = steps
        inner = here // columns
        here = inner // rows * block + inner % rows * row + here % columns
    return here.to(torch.int32) + offset


def random_halves(index: Tensor, name_salt: Any, step_salt: Any) -> Iterator[Tensor]:
    """Three times 16 random bits for each number, int32.

    Args:
        index: int32, its place in the whole tensor.
        name_salt: `salt_of` the name; a number, or an int32 scalar on the device.
        step_salt: `scattered` of the step's number, the same.
    """
    x = index + step_salt
    x = (x ^ (x >> 16 & HALF)) * FIRST + name_salt
    x = (x ^ (x >> 15 & 0x1FFFF)) * SECOND
    x = (x ^ (x >> 16 & HALF)) * THIRD
    yield x >> 16 & HALF
    x = (x ^ (x >> 15 & 0x1FFFF)) * FIRST  # each from the high bits of a product
    yield x >> 16 & HALF
    yield (x ^ (x >> 15 & 0x1FFFF)) * SECOND >> 16 & HALF


def scattered(numbers: Tensor) -> Tensor:
    """Random int32 for numbers, such as those of steps: the hash lowbias32 of each."""
    x = numbers * THIRD
    x = (x ^ (x >> 16 & HALF)) * FIRST
    x = (x ^ (x >> 15 & 0x1FFFF)) * SECOND
    return x ^ (x >> 16 & HALF)


def store(into: Tensor, values: Tensor, halves: Iterator[Tensor]) -> None:
    """Write float32 values into a tensor of float32, or of bfloat16, rounded with the next of `halves`."""
    if into.dtype != torch.bfloat16:
        into.copy_(values)
        return
    # Added to the digits that are cut off, the random ones carry as often as those are large.
    rounded = (values.view(torch.int32) + next(halves) & ~HALF).view(torch.float32)
    into.copy_(
        torch.where(values == values, rounded, values)
    )  # the digits of a NaN could carry into the sign


def _int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31
