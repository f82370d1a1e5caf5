"""Stochastic rounding to bfloat16, with random bits derived only from a parameter's name, the step and
positions.

Rounding to nearest drops any change smaller than half of bfloat16's last digit (0.2 to 0.4 %), however often
it recurs: a second moment under beta2 = 0.999 never decays, and a weight under a small learning rate stands
still. Rounding up with a probability equal to the fraction that is cut off makes both move as in float32 on
average (arXiv 2010.06192). The bits are a hash of (name, step, position in the whole tensor), so there is no
state to save and no generator to share, and replicas and other layouts round alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

FIRST, SECOND, THIRD = 0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B1 - 2**32
"""Odd factors, as int32: those of the hash lowbias32 (https://nullprogram.com/blog/2018/07/31), and 2**32
divided by the golden ratio."""
HALF = 0xFFFF


class Place(NamedTuple):
    """Position of a rank's shard in the whole tensor."""

    offset: int
    """Flat index of the shard's first element, modulo 2**32, as int32."""
    steps: tuple[int, int, int, int] | None
    """Strides for the other elements, see `indices`; None: the shard is contiguous in the whole tensor."""


def salt_of(text: str) -> int:
    """Return a pseudorandom int32 for a name."""
    return _int32(xxhash.xxh32_intdigest(text.encode()))


def place_of(parameter: Tensor) -> Place:
    """Return the position of this rank's shard of a parameter, which is a rectangular block."""
    if not isinstance(parameter, DTensor):
        return Place(0, None)
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from titancli.distributed.private import offsets_of

    whole = parameter.shape
    with unset_fake_temporarily():  # offsets are read to the host, even in a dry run
        starts = offsets_of(parameter)
    # Merge each unsharded dimension into the one before it.
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
    """Return the flat indices in the whole tensor of `count` shard elements from `first` on, modulo 2**32.

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
    """Yield three times 16 random bits per element, as int32.

    Args:
        index: int32, each element's flat index in the whole tensor.
        name_salt: `salt_of` the name; a number, or an int32 scalar on the device.
        step_salt: `scattered` of the step number; likewise.
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
    """Return pseudorandom int32 for numbers such as step numbers: the hash lowbias32 of each."""
    x = numbers * THIRD
    x = (x ^ (x >> 16 & HALF)) * FIRST
    x = (x ^ (x >> 15 & 0x1FFFF)) * SECOND
    return x ^ (x >> 16 & HALF)


def store(into: Tensor, values: Tensor, halves: Iterator[Tensor]) -> None:
    """Write float32 values into a float32 tensor, or into a bfloat16 one, rounded with the next of
    `halves`."""
    if into.dtype != torch.bfloat16:
        into.copy_(values)
        return
    # The sum carries into the kept digits with a probability equal to the fraction that is cut off.
    rounded = (values.view(torch.int32) + next(halves) & ~HALF).view(torch.float32)
    into.copy_(torch.where(values == values, rounded, values))  # a carry could reach the sign bit of a NaN


def _int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31
