"""Two runs side by side: how far apart, and the table that the suite ends with."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """The largest relative differences, ‖Δ‖ / ‖reference‖ per tensor, and where they are."""

    loss: float
    norm: float
    gradient: float
    weight: float
    worst: str
    tie: str | None = None
    """The first place where tokens went to other experts; rounding may do that where two score alike."""

    @property
    def largest(self) -> float:
        return max(self.loss, self.norm, self.gradient, self.weight)


def difference(results: list[dict[str, torch.Tensor]], reference: dict[str, torch.Tensor]) -> Difference:
    """How far the ranks' results are from one rank's; all ranks together must have every tensor of it."""
    largest = dict.fromkeys(("loss", "norm", "gradient", "weight"), 0.0)
    worst, at, ties = "", -1.0, []
    assert set().union(*results) == reference.keys()
    for result in results:
        for name, value in result.items():
            expected = reference[name]
            assert value.shape == expected.shape, name
            error = float((value - expected).norm() / expected.norm().clamp(min=1e-12))
            error = error if error == error else float("inf")  # not a number
            kind = name.split(" ")[0]
            if kind == "routes":
                ties += [name] * (error > 0)
                continue
            largest[kind] = max(largest[kind], error)
            if error > at:
                worst, at = name, error
    return Difference(**largest, worst=worst, tie=min(ties, default=None))


@dataclass(frozen=True)
class Row:
    layout: str
    ranks: int
    optimizer: str
    found: Difference
    tolerance: float
    seconds: float


def table(rows: list[Row]) -> list[str]:
    width = max(len(row.layout) for row in rows)
    lines = [f"{'layout':<{width}}  ranks  optim  loss     norm     gradient weight   allowed  seconds"]
    for row in rows:
        numbers = (row.found.loss, row.found.norm, row.found.gradient, row.found.weight, row.tolerance)
        shown = "  ".join(f"{number:.1e}" for number in numbers)
        lines.append(
            f"{row.layout:<{width}}  {row.ranks:>5}  {row.optimizer:<5}  {shown}  {row.seconds:>7.1f}"
            + ("  a tie" if row.found.tie else "")
        )
    return lines
