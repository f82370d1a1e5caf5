"""Compare a case's results with those of one process: find what is wrong, and where it begins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titan_proof.prove.measure import STEPS, Results, gradients_of
from titancli import Recipe

FLOOR, FACTOR, MEANINGLESS = 1e-5, 5.0, 0.3
"""The smallest tolerance of ‖Δ‖ / ‖reference‖ per tensor; the tolerance as a multiple of the effect of a
nudge of the weights; and the effect of a nudge above which a tensor carries no information: it is zero up
to rounding."""
FLOOR_BF16 = 2.0**-7
"""The smallest tolerance in bfloat16: two units in the last place."""
KINDS = ("initial", "loss", "gradient", "norm", "applied", "weight")
"""Kinds in the order of a step. (`output` shows where a loss goes wrong, `routes` why.)"""


@dataclass
class Reference:
    """The results of one process, and how much rounding changes them."""

    results: Results
    tolerance: dict[str, float]
    """By `STEP KIND NAME`; tensors that carry no information are left out."""
    noise: dict[str, float] = field(default_factory=dict)
    """The largest effect of rounding on a kind in a step, by `STEP KIND`."""


def reference_of(plain: Results, *nudged: Results, floor: float = FLOOR) -> Reference:
    """Make a reference from the results of one process, and of the same process with its weights nudged, once
    or several times, by as much as rounding might change them.

    The effect of rounding on a tensor depends on the model, its converters and its optimizer (float8 rounds
    some numbers the other way, Adam divides by small ones), so it is measured.

    Args:
        floor: the smallest tolerance of a tensor.
    """
    errors = {
        key: max(distance(one.tensors[key], value) for one in nudged) for key, value in plain.tensors.items()
    }
    kinds = (*KINDS, "output")
    noise = {f"{step} {kind}": 0.0 for step in range(STEPS) for kind in kinds}
    for key, error in errors.items():
        if kind_of(key) in kinds and error < MEANINGLESS:
            noise[_group(key)] = max(noise[_group(key)], error)
    # The effect of a nudge on a single number may be small by chance, so use the tensors that it is computed
    # from.
    least = {
        f"{step} {kind}": max(FLOOR, noise[f"{step} {of}"])
        for step in range(STEPS)
        for kind, of in (("norm", "gradient"), ("loss", "output"))
    }
    tolerance = {
        key: max(least.get(_group(key), floor), FACTOR * noise[_group(key)])
        for key, error in errors.items()
        if kind_of(key) in kinds and error < MEANINGLESS
    }
    return Reference(plain, tolerance, noise)


def not_finite(plain: Results) -> str | None:
    """Return the first result of a process that is not finite, in words, or None. The effect of rounding
    on it could not be measured, so nothing would be compared with it."""
    words = {
        "loss": "the loss",
        "gradient ": "the gradient of ",
        "norm": "the gradient norm",
        "applied ": "the gradient after division and clipping of ",
        "weight ": "after the optimizer step, ",
    }
    for step in range(STEPS):
        for kind, text in words.items():
            for key, value in plain.tensors.items():
                if key.startswith(f"{step} {kind}") and not bool(value.isfinite().all()):
                    before = plain.tensors.get(f"{step} initial {_name(key)}")
                    if kind != "weight " or before is None or bool(before.isfinite().all()):
                        return f"{text}{_name(key)} is not finite (step {step + 1})"
    return None


def adds_up(recipe: Recipe, rows: int, reference: Reference) -> bool:
    """Return whether the gradients of two halves of the rows add up to those of all rows. They do unless a
    value depends on the rows that are computed together."""
    whole, halves = (gradients_of(recipe, rows, pieces) for pieces in (1, 2))
    # No FACTOR: an effect close to the tolerance here would exceed it on some layout.
    limit = max(FLOOR, reference.noise["0 gradient"])
    return all(
        distance(halves[name], gradient) <= limit
        for name, gradient in whole.items()
        if f"0 gradient {name}" in reference.tolerance
    )


def kind_of(key: str) -> str:
    return key.split(" ")[1]


def _group(key: str) -> str:
    return " ".join(key.split(" ")[:2])


def distance(found: Tensor, expected: Tensor) -> float:
    """Return ‖Δ‖ / ‖expected‖; infinite if the shapes differ or a number is not finite."""
    if found.shape != expected.shape:
        return math.inf
    size, error = float(expected.double().norm()), float((found.double() - expected.double()).norm())
    if error == 0:
        return 0.0
    return error / max(size, 1e-12) if math.isfinite(error) else math.inf


def compared(found: Results, reference: Reference) -> dict[str, Any]:
    """Return the comparison as plain JSON: `status`, `worst`, `where`, and `fault` (None: nothing is
    wrong)."""
    expected = reference.results.tensors
    errors = {
        key: distance(found.tensors[key], expected[key]) if key in found.tensors else math.inf
        for key in reference.tolerance
        if kind_of(key) in KINDS
    }
    wrong = {key for key, error in errors.items() if error > reference.tolerance[key]}
    where = max(errors, key=lambda key: errors[key] / reference.tolerance[key])
    found_worst = {"worst": finite(errors[where]), "where": where, "tolerance": reference.tolerance[where]}
    if not wrong:
        return {"status": "right", **found_worst, "fault": None}
    for step in range(STEPS):
        for kind in KINDS:
            here = {key for key in wrong if key.startswith(f"{step} {kind}")}
            if here:
                return {"status": "wrong", **found_worst, "fault": _fault(step, kind, here, found, reference)}
    raise RuntimeError(f"{wrong} are of no kind")


def _fault(step: int, kind: str, wrong: set[str], found: Results, reference: Reference) -> dict[str, Any]:
    """Return where an error begins: the first wrong parameter in forward order, and the one that is
    computed first."""
    order = reference.results.order
    place = {name: number for number, name in enumerate(order)}
    # The loss of an untrained model may be nearly right although its forward is wrong.
    output = _first_output(step, found, reference) if kind in ("loss", "gradient") else None
    forward = kind == "loss" or output is not None
    key = f"{step} {kind}"
    if forward:
        gradients = [k for k in reference.tolerance if k.startswith(f"{step} gradient ")]
        wrong = {
            k
            for k in gradients
            if k in found.tensors
            and distance(found.tensors[k], reference.results.tensors[k]) > reference.tolerance[k]
        }
        if output is not None:
            inside = {k for k in wrong if _name(k).startswith(f"{output}.")}
            wrong = inside or wrong
    named = sorted((k for k in wrong if _name(k)), key=lambda k: (place.get(_name(k), len(place)), k))
    first = named[0] if named else None
    # Backward runs in the other direction: an error in it spreads from the end to the beginning.
    enters = named[-1] if named and not forward and kind == "gradient" else first
    routes = sorted(
        k
        for k, value in reference.results.tensors.items()
        if k.startswith(f"{step} routes") and k in found.tensors and not torch.equal(found.tensors[k], value)
    )
    shown = first or key
    return {
        "step": step + 1,
        "kind": kind if output is None else "forward",
        "parameter": None if first is None else _name(first),
        "enters": None if enters is None else _name(enters),
        "output": output,
        "routes": [_name(k) for k in routes],
        "wrong": len(named),
        "of": sum(1 for k in reference.tolerance if k.startswith(f"{step} {_kind(shown)} ")),
        "difference": finite(distance(found.tensors[shown], reference.results.tensors[shown]))
        if shown in found.tensors
        else None,
        "scale": _scale(enters or shown, found, reference),
    }


def _name(key: str) -> str:
    return key.split(" ", 2)[2] if key.count(" ") > 1 else ""


def _kind(key: str) -> str:
    return kind_of(key)


def _first_output(step: int, found: Results, reference: Reference) -> str | None:
    """Return the first module of the residual stream whose output differs, however its tokens are
    distributed."""
    for key, expected in reference.results.tensors.items():
        if (
            not key.startswith(f"{step} output ")
            or key not in found.tensors
            or key not in reference.tolerance
        ):
            continue
        values = found.tensors[key]
        times, rest = divmod(len(values), len(expected))
        if rest or not times:
            continue
        if distance(values[::times], expected) > reference.tolerance[key]:
            return _name(key)
    return None


def _scale(key: str, found: Results, reference: Reference) -> float | None:
    """Return the factor by which a tensor is too large, if that is its only error."""
    if key not in found.tensors:
        return None
    value, expected = found.tensors[key].double(), reference.results.tensors[key].double()
    square = float((expected * expected).sum())
    if value.shape != expected.shape or not square or not bool(value.isfinite().all()):
        return None
    factor = float((value * expected).sum()) / square
    return factor if distance(value, factor * expected) < 1e-3 and abs(factor) > 1e-6 else None


def finite(value: float) -> float | None:
    """Return a finite number, or None, since JSON has no others."""
    return value if math.isfinite(value) else None
