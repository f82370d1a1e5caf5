"""Initial values that do not depend on the layout: each rank computes those of its shard.

A value is a counter-based random number, a function of its parameter's generator and of its position in the
whole parameter: SplitMix64 (Steele, Lea and Flood, 2014) of the generator's seed plus the position.
Everything derived from it is exact (integers, and +, ×, ÷ of float32), since logarithms and the like differ
in the last bit between CPUs, and on one CPU between the body and the end of an array. So values are bitwise
the same on every layout, device and version of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from titancli.distributed.private import offsets_of

_AT_A_TIME = 1 << 18
"""Values computed together: about 8 MiB, which usually fits a CPU's cache."""

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64."""

# Fitted for the smallest maximum error; from the highest power down. log2(1 + s) is s · _LOG(s), to 3e-7 for
# s in [0, 1]. A normal distribution has the probability 1 - x beyond ±z where z is x · _OVER(w) / _UNDER(w)
# with w = -log2(1 - x²), to 2e-6 of z, for z up to 6.5.
_LOG = (
    0.0155295996, -0.0795566335, 0.1942928414, -0.3259009894, 0.4735530797, -0.7205854172, 1.4426678265,
)  # fmt: skip
_OVER = (2.405223390e-06, 5.117096092e-04, 7.377583535e-03, 7.050078370e-02, 4.342544998e-01, 1.253314935)
_UNDER = (4.726614887e-05, 2.152879900e-03, 1.999247501e-02, 1.650359078e-01, 1.0)


def normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with normal values of mean 0."""
    _draw(parameter, generator, lambda words: _normal(words, math.inf).mul_(std))


def trunc_normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with normal values of mean 0, truncated at three standard deviations."""
    _draw(parameter, generator, lambda words: _normal(words, 3.0).mul_(std))


def uniform_(parameter: Tensor, bound: float, generator: torch.Generator) -> None:
    """Fill with uniform values between -bound and bound."""
    _draw(parameter, generator, lambda words: words.float().add_(0.5).mul_(2.0**-31).mul_(bound))


@torch.no_grad()
def constant_(parameter: Tensor, value: float) -> None:
    """Fill with one value."""
    _local(parameter).fill_(value)


def ones_(parameter: Tensor) -> None:
    constant_(parameter, 1.0)


def zeros_(parameter: Tensor) -> None:
    constant_(parameter, 0.0)


@torch.no_grad()
def fill(parameter: Tensor, draw: Callable[[Tensor], object]) -> None:
    """Call `draw` to fill a whole fp32 tensor of the parameter's shape, and keep this rank's shard.

    For distributions that the other functions do not provide: every rank allocates and draws the whole.
    DTensor's own random operations are not used: on a CPU they give each shard the same numbers and each
    replica different ones.
    """
    whole = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    draw(whole)
    if isinstance(parameter, DTensor):
        # src_data_rank=None: all ranks have drawn the same values, and each keeps its shard.
        whole = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        ).to_local()
    _local(parameter).copy_(whole)


@torch.no_grad()
def _draw(parameter: Tensor, generator: torch.Generator, values: Callable[[Tensor], Tensor]) -> None:
    """Fill this rank's shard with `values` of random words, int32. Changes the generator's seed."""
    seed = generator.initial_seed()
    generator.manual_seed(_mixed(seed + 2 * _GAMMA) >> 1)
    shape = parameter.shape
    place: Sequence[int] = [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        place = offsets_of(parameter)
    steps = [_GAMMA * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = _mixed(seed + _GAMMA) + sum(at * step for at, step in zip(place, steps, strict=True))
    for box, counters in _boxes(_local(parameter), first, steps):
        box.copy_(values(_words(counters)))


def _boxes(local: Tensor, first: int, steps: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide a shard into small boxes; counters begin at `first` and grow by a step along each dimension."""
    if local.numel() <= _AT_A_TIME:
        counters = torch.tensor(_int64(first), device=local.device)
        for size, step in zip(local.shape, steps, strict=True):
            counters = counters[..., None] + torch.arange(size, device=local.device) * _int64(step)
        yield local, counters
        return
    rows = max(1, _AT_A_TIME * len(local) // local.numel())
    for row in range(0, len(local), rows):
        some, at = local[row : row + rows], first + row * steps[0]
        yield from _boxes(some[0], at, steps[1:]) if rows == 1 else _boxes(some, at, steps)


def _words(counters: Tensor) -> Tensor:
    """Return the upper half of SplitMix64 of each counter, int32; in place."""
    shifted = torch.empty_like(counters)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        torch.bitwise_right_shift(counters, shift, out=shifted)
        counters.bitwise_xor_(shifted.bitwise_and_((1 << 64 - shift) - 1)).mul_(_int64(factor))
    # The last step is x ^ x >> 31, and only its upper half is needed.
    torch.bitwise_right_shift(counters, 31, out=shifted)
    return counters.bitwise_xor_(shifted.bitwise_and_((1 << 33) - 1)).bitwise_right_shift_(32).int()


def _normal(words: Tensor, largest: float) -> Tensor:
    """Map uniform words to the normal distribution within ±largest; fp32, up to 6.4."""
    signs = words >> 31  # 0 or -1
    tails = (words ^ signs).float().add_(0.5).mul_(2.0**-31)  # uniform in (0, 1): the probability beyond ±z
    if beyond := math.erfc(largest / math.sqrt(2)):
        tails.mul_(1 - beyond).add_(beyond)
    bits = (tails * (2 - tails)).view(torch.int32)
    part = (bits & 0x7FFFFF | 0x3F800000).view(torch.float32).sub_(1)
    w = _polynomial(_LOG, part).mul_(part).add_((bits >> 23).sub_(127)).neg_()
    z = (1 - tails).mul_(_polynomial(_OVER, w)).div_(_polynomial(_UNDER, w))
    return z.mul_(signs.bitwise_or_(1)).clamp_(-largest, largest)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    first, second, *others = coefficients
    value = (x * first).add_(second)
    for other in others:
        value.mul_(x).add_(other)
    return value


def _mixed(number: int) -> int:
    """Return SplitMix64 of a number."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        number %= 1 << 64
        number = (number ^ number >> shift) * factor
    return number


def _int64(number: int) -> int:
    """Return the int64 with a number's last 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
