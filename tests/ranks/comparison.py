"""Two runs side by side: how far apart."""

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
