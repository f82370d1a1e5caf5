"""Numbers that would fit, for those who wrote one that does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping


def divisors(*sizes: int) -> list[int]:
    """What divides all of these."""
    common = math.gcd(*sizes)
    small = [n for n in range(1, math.isqrt(common) + 1) if common % n == 0]
    return sorted({*small, *(common // n for n in small)})


def near(value: int, fitting: Iterable[int]) -> str:
    """The fitting numbers in words: all of a few, else the two below and the two above."""
    found = sorted(fitting)
    if len(found) > 6:
        found = [n for n in found if n < value][-2:] + [n for n in found if n >= value][:2]
    return " or ".join(filter(None, [", ".join(map(str, found[:-1])), str(found[-1])]))


def nearest_degrees(
    degrees: Mapping[str, int], world: int, can: Callable[[str, int], bool] = lambda name, degree: True
) -> str | None:
    """The degree of a mesh that is least far from making `world` ranks, and what it would be, in words.

    Args:
        degrees: by name; -1 takes the ranks that are left.
        can: whether the model can be cut so.
    """
    fixed = {name: degree for name, degree in degrees.items() if degree != -1}
    options: list[tuple[int, str]] = []
    for name, degree in fixed.items():
        others = math.prod(fixed.values()) // degree
        if degree == 1 or world % others:
            continue
        left = world // others
        makes = divisors(left) if len(fixed) < len(degrees) else [left]
        fitting = [n for n in makes if can(name, n)]
        if not fitting:
            continue
        distance = min(abs(degree - n) for n in fitting)
        options.append((distance, f"mesh.{name} = {near(degree, fitting)}"))
    return min(options)[1] if options else None
