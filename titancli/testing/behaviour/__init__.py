"""What components do, kind by kind: the checks that `check_plugin` runs once a component can be built.

Each file beside this has the checks of a kind, in a table `CHECKS` from a check's name to a function that
yields what is wrong. They run on the CPU, on rows of a few tokens; what needs two ranks is collected and run
by `ranks.py` in one go.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titancli.errors import TitanError
from titancli.registry.plugins import own_traceback

if TYPE_CHECKING:
    from torch import Tensor

    from titancli.data.batch import Batch

ROOMS = {
    "model": "models",
    "tokenizer": "tokenizers",
    "dataset": "datasets",
    "converter": "converters",
    "parallelize": "converters",
    "loss": "losses",
    "optimizer": "optimizers",
    "logger": "loggers",
    "task": "rollouts",
    "reward": "rollouts",
    "advantage": "rollouts",
    "generator": "rollouts",
}
"""The file that a kind's checks are in."""


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


def checks_of(kind: str) -> dict[str, Check]:
    """Return the checks of a kind by name."""
    room = ROOMS.get(kind)
    if room is None:
        return {}
    return importlib.import_module(f"{__name__}.{room}").CHECKS[kind]


def behaviour_faults(subject: Subject, skip: frozenset[str]) -> Iterator[str]:
    """Run a component's checks, and say by name what each found.

    Args:
        skip: names of checks to leave out.
    """
    for name, check in checks_of(subject.kind).items():
        if name in skip:
            continue
        try:
            for fault in check(subject):
                yield f"[{name}] {fault}"
        except TitanError as error:
            yield f"[{name}] {error}"
        except Exception as error:
            yield f"[{name}] it raises: {own_traceback(error)}"


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
