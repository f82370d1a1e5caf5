"""Compare the numbers of two runs that should agree, and find the known differences that can explain a
deviation. Torch-free, unless weights of two layouts are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_proof.differences import Difference, provenance_differences, unknown
from titan_proof.reproduction import COMPARED, Reproduction, folder_of
from titancli.runs import RunFolder

Result = Literal["bitwise_equal", "within_envelope", "parts", "not_comparable"]

ENVELOPE = {"float32": {"loss": 1e-5, "grad_norm": 2e-4}, "bfloat16": {"loss": 2e-3, "grad_norm": 2e-2}}
"""The relative difference that another order of additions may cause in the first step, by dtype."""
WIDEST = 0.05
"""Upper limit of the envelope: a run that deviates this much is a different one, however long it is."""


@dataclass(frozen=True)
class Deviation:
    """The largest relative difference of a metric, and the step that has it."""

    metric: str
    """A metric of `COMPARED`; or the weights of a checkpoint, with the parameter that differs most."""
    relative: float
    step: int


@dataclass(frozen=True)
class Verdict:
    """The result of comparing two runs."""

    result: Result
    step: int | None
    """The first step at which they diverge."""
    because: list[Difference]
    """The known differences that can explain the result."""
    compared: list[int]
    """The steps that both have logged."""
    weights: dict[str, bool]
    """Whether the checkpoints that both have are equal, by step."""
    largest: list[Deviation]
    differences: list[Difference]
    """All known differences."""
    unknown: list[str]
    """Facts that one of the two runs did not record."""
    envelope: dict[str, float]
    """The envelope of each metric at the last compared step."""


def compare(before: Reproduction, after: Reproduction) -> Verdict:
    """Compare the numbers of two runs, and explain the differences.

    Raises:
        EnvironmentProblem: a recipe is not TOML.
    """
    known = provenance_differences(before, after)
    steps = sorted(map(int, before.steps.keys() & after.steps.keys()))
    weights = {
        step: before.weights[step] == after.weights[step]
        for step in sorted(before.weights.keys() & after.weights.keys(), key=int)
        # Another layout has other files, whatever their contents.
        if before.weights[step].keys() == after.weights[step].keys()
    }
    unequal = [step for step in steps if before.steps[str(step)] != after.steps[str(step)]]
    unequal_weights = [int(step) for step, equal in weights.items() if not equal]
    first = min(unequal + unequal_weights, default=None)
    rounding = [one for one in known if one.effect == "rounding"]
    bounds = _bounds(before)
    outside = [step for step in steps if _is_outside(before, after, step, bounds)]
    result: Result
    because: list[Difference] = []
    if not steps:
        result = "not_comparable"
    elif first is None:
        result = "bitwise_equal"
    elif rounding and not outside:
        result, because = "within_envelope", rounding
    else:
        result = "parts"
        # The envelope accounts for rounding: anything beyond it has another cause.
        because = [one for one in known if one.effect == "results"]
        first = min(outside) if rounding and outside else first
    return Verdict(
        result=result,
        step=first,
        because=because,
        compared=steps,
        weights=weights,
        largest=_largest(before, after, steps) + _of_weights(before, after, compared=list(weights)),
        differences=known,
        unknown=unknown(before, after),
        envelope={name: _limit(bounds[name], steps[-1] if steps else 1) for name in COMPARED},
    )


# ------------------------------------------------------------------------------------------- numbers


def _bounds(run: Reproduction) -> dict[str, float]:
    dtype = run.data.get("training", {}).get("mixed_precision_param", "bfloat16")
    return ENVELOPE.get(dtype, ENVELOPE["bfloat16"])


def _limit(bound: float, step: int) -> float:
    """Return the envelope at a step: rounding adds up like a random walk."""
    return min(WIDEST, bound * math.sqrt(step))


def _is_outside(before: Reproduction, after: Reproduction, step: int, bounds: Mapping[str, float]) -> bool:
    return any(
        relative > _limit(bounds[name], step)
        for name, relative in _relative(before.steps[str(step)], after.steps[str(step)])
    )


def _relative(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the relative difference of each metric; infinite if only one of the two is a finite number."""
    for name in COMPARED:
        a, b = one.get(name), other.get(name)
        if a == b:
            yield name, 0.0
        elif isinstance(a, (int, float)) and isinstance(b, (int, float)):
            yield name, abs(a - b) / abs(a) if a else math.inf
        else:
            yield name, math.inf


def _of_weights(before: Reproduction, after: Reproduction, compared: Sequence[str]) -> list[Deviation]:
    """Return the deviation of the weight that differs most in the last common checkpoint, if its files are
    of different layouts."""
    both = sorted(before.weights.keys() & after.weights.keys(), key=int)
    folders = [folder_of(run) for run in (before, after)]
    sides = [RunFolder(path).checkpoints / f"step-{both[-1]}" for path in folders if path and both]
    if len(sides) < 2 or both[-1] in compared or not all(side.is_dir() for side in sides):
        return []
    from titan_proof.checkpoints import compare_checkpoints

    found = compare_checkpoints(*sides).unequal
    weights = [one for one in found if one.name.startswith("model.")]
    if not weights:
        return []
    worst = max(weights, key=lambda one: one.relative)
    name = worst.name.removeprefix("model.")
    return [Deviation(f"weights ({name})", worst.relative, int(both[-1]))]


def _largest(before: Reproduction, after: Reproduction, steps: Sequence[int]) -> list[Deviation]:
    found: dict[str, Deviation] = {}
    for step in steps:
        for name, relative in _relative(before.steps[str(step)], after.steps[str(step)]):
            if relative > (found[name].relative if name in found else 0.0):
                found[name] = Deviation(name, relative, step)
    return list(found.values())
