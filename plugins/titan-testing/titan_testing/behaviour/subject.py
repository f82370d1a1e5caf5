"""What the checks of all kinds are given, and compare by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from titancli import Batch


class Example(NamedTuple):
    """What a model or a loss is tried on that takes something else than tokens."""

    batch: Batch
    loss: Any = None
    """A model's: the config of the loss that it is trained with; None: cross-entropy."""
    out: Tensor | None = None
    """A loss's: what it is called with beside the batch; None: log-probabilities or logits of tokens."""


@dataclass(frozen=True)
class Subject:
    """A component under test."""

    label: str
    """`kind/name`."""
    kind: str
    config: Any
    target: Callable[..., Any]
    folder: Path
    """An empty one."""
    example: Callable[[int], Any] | None = None
    """Makes an `Example` of so many rows, always the same one; for a reward, prompts and completions."""
    seq_len: int = 16
    """How long a dataset's rows are."""


Check = Callable[[Subject], Iterator[str]]


def first_difference(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> str | None:
    """Describe which tensor of two sets differs most by ‖Δ‖ / ‖one‖; None if that is within the tolerance."""
    worst, where = tolerance, None
    for name in one.keys() & other.keys():
        a, b = one[name].double(), other[name].double()
        if a.shape != b.shape:
            return f"{name} is {list(a.shape)} and {list(b.shape)}"
        distance = float((a - b).norm() / a.norm().clamp(min=1e-30)) if a.norm() or b.norm() else 0.0
        if not distance <= worst:  # a NaN too
            worst, where = distance, f"{name} differs by {distance:.1e} relative to its size"
    return where
