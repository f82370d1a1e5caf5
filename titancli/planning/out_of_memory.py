"""What is said of a run without enough memory: what was live, what a step takes, what would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from titancli.errors import TitanError
from titancli.layout.degrees import Degrees
from titancli.observe.peaks import DEVICES, Device
from titancli.planning.advice import remedy
from titancli.planning.estimate import CONTEXT, Estimate, estimate
from titancli.recipe.schema import Recipe

GIB = 2**30
ENOUGH = 0.85
"""Of the estimate: a change that saves less may not help a run that has just been refused memory."""


def told(recipe: Recipe, degrees: Degrees, device: str, live: Mapping[str, float]) -> str:
    """Return what was live on a rank, beside what `titan plan` estimates for such a step.

    Args:
        device: its name, as its maker has it.
        live: bytes by what they are for, measured: `parameters`, `optimizer`, and the allocator's figures.
    """
    lines = ["live:      " + _sizes(live)] if live else []
    found = _estimate(recipe, degrees, device)
    if found is not None:
        classes = {kind: size for kind, size in found.worst.classes.items() if size >= 2**20}
        lines.append(f"estimate:  {_sizes(classes)}; {_gib(found.worst.total)} in all ({found.worst.moment})")
    return "\n".join(f"  {line}" for line in lines)


def advice(recipe: Recipe, degrees: Degrees, device: str) -> str | None:
    """Return the overrides that save enough at the least cost, as they are typed; None if none is known."""
    found = _estimate(recipe, degrees, device)
    if found is None:
        return None
    change = remedy(recipe, _refused(found))
    if change is None:
        return None
    slower = f", {change.slower:.0%} slower" if change.slower is not None and change.slower > 0.005 else ""
    return f"{' '.join(change.overrides)} (estimate: {_gib(change.peak)}{slower})"


def _estimate(recipe: Recipe, degrees: Degrees, device: str) -> Estimate | None:
    try:
        return estimate(recipe, degrees, _device(device))
    except (
        TitanError
    ):  # of a model that cannot be measured nothing is known; the run has its own error to tell
        return None


def _device(name: str) -> Device:
    """A device whose speed is not known is taken for another: what is the cheapest hardly depends on it."""
    return next((device for known, device in DEVICES.items() if known in name.split()), DEVICES["H100"])


def _refused(found: Estimate) -> Estimate:
    """The same on a device that it does not fit on, whatever its size: it was refused memory there."""
    memory = ENOUGH * found.worst.total + CONTEXT + found.reserve
    device = dataclasses.replace(found.work.device, memory=memory)
    return dataclasses.replace(found, work=dataclasses.replace(found.work, device=device))


def _sizes(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
