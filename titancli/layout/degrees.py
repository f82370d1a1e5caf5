"""Degrees of parallelism: those of a recipe, on a number of ranks; and numbers that would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from titancli.errors import RecipeError
from titancli.registry.component import section


def divisors(*sizes: int) -> list[int]:
    """Return the common divisors of these sizes."""
    common = math.gcd(*sizes)
    small = [n for n in range(1, math.isqrt(common) + 1) if common % n == 0]
    return sorted({*small, *(common // n for n in small)})


def near(value: int, fitting: Iterable[int]) -> str:
    """Return the fitting numbers in words: all of a few, else the two below and the two above."""
    found = sorted(fitting)
    if len(found) > 6:
        found = [n for n in found if n < value][-2:] + [n for n in found if n >= value][:2]
    return " or ".join(filter(None, [", ".join(map(str, found[:-1])), str(found[-1])]))


def nearest_degrees(
    degrees: Mapping[str, int], world: int, can: Callable[[str, int], bool] = lambda name, degree: True
) -> str | None:
    """Return the degree of a mesh that is nearest to making `world` ranks, and its value, in words.

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


# --------------------------------------------------------------------------------------------------- degrees


@dataclass(frozen=True)
class Degrees:
    """A mesh with every degree known. `world = pp * dp_replicate * dp_shard * cp * tp`."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Ranks whose batches differ."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


Degree = Annotated[int, Ge(1)] | Literal[-1]


@section
class Mesh:
    """Degrees of parallelism. One of them may be -1, which stands for all remaining ranks."""

    effect: ClassVar = "speed"
    pp: Degree = 1
    """Pipeline-parallel degree."""
    dp_replicate: Degree = 1
    """Number of replicas of the whole model (DDP if dp_shard is 1, HSDP otherwise)."""
    dp_shard: Degree = -1
    """Number of ranks over which parameters are sharded (FSDP2)."""
    cp: Degree = 1
    """Context-parallel degree: ranks over which a sequence is split."""
    tp: Degree = 1
    """Tensor-parallel degree: ranks over which a layer's matrices are sharded."""
    ep: Annotated[int, Ge(1)] = 1
    """Expert-parallel degree: ranks over which experts are distributed, taken from dp_shard * cp * tp."""

    def resolve(self, world: int, can: Callable[[str, int], bool] = lambda name, degree: True) -> Degrees:
        """Return the degrees on `world` ranks.

        Args:
            can: whether the model can be cut so; an error names only such degrees.

        Raises:
            RecipeError: they do not multiply to `world`, or more than one is -1.
        """
        degrees = {n: getattr(self, n) for n in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
        text = " x ".join(f"{name}={degree}" for name, degree in degrees.items())
        free = [name for name, degree in degrees.items() if degree == -1]
        if len(free) > 1:
            raise RecipeError(f"mesh: only one degree may be -1, not {' and '.join(free)}")
        fixed = 1
        for degree in degrees.values():
            fixed *= 1 if degree == -1 else degree
        if world % fixed or (not free and fixed != world):
            start = f"start {'a multiple of ' * bool(free)}{fixed} rank{'s' if fixed > 1 else ''}"
            left = None if free or world % fixed else "one degree = -1"
            other = nearest_degrees(degrees, world, can) or left
            raise RecipeError(
                f"mesh: {text} does not make {world} rank{'s' if world > 1 else ''}",
                hint=f"{start}, or set {other}" if other else start,
            )
        if free:
            degrees[free[0]] = world // fixed
        return Degrees(**degrees, ep=self.ep)
