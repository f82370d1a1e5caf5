"""The component under test, as passed to all checks, and comparison of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_testing.protocols import offered
from titancli.registry.component import completed

if TYPE_CHECKING:
    from torch import Tensor

    from titancli import Batch


class Example(NamedTuple):
    """An input for a model or a loss that takes something other than tokens."""

    batch: Batch
    loss: Any = None
    """For a model: the config of the loss that it is trained with; None: cross-entropy."""
    out: Tensor | None = None
    """For a loss: its argument besides the batch; None: log-probabilities or logits of tokens."""


@dataclass(frozen=True)
class Subject:
    """A component under test."""

    label: str
    """`kind/name`."""
    kind: str
    config: Any
    target: Callable[..., Any]
    folder: Path
    """An empty folder."""
    example: Callable[[int], Any] | None = None
    """Makes an `Example` with this many rows, always the same; for a reward, prompts and completions."""
    seq_len: int = 16
    """Length of a dataset's rows."""

    def build(self, **runtime: Any) -> Any:
        """Build the component as a run does."""
        return completed(self.kind, self.target(self.config, **runtime, **offered(self.kind, self.target)))


Check = Callable[[Subject], Iterator[str]]


def first_difference(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> str | None:
    """Describe the tensor that differs most by ‖Δ‖ / ‖one‖; None if it is within the tolerance."""
    worst, where = tolerance, None
    for name in one.keys() & other.keys():
        a, b = one[name].double(), other[name].double()
        if a.shape != b.shape:
            return f"{name} is {list(a.shape)} and {list(b.shape)}"
        distance = float((a - b).norm() / a.norm().clamp(min=1e-30)) if a.norm() or b.norm() else 0.0
        if not distance <= worst:  # also for NaN
            worst, where = distance, f"{name} differs by {distance:.1e} relative to its size"
    return where
