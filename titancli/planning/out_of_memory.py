"""The report for a run that is out of memory: what was live, what a step needs, what would make it fit."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping

from titancli.errors import TitanError
from titancli.layout.degrees import Degrees
from titancli.observe.peaks import DEVICES, Device
from titancli.planning.advice import remedy
from titancli.planning.estimate import CONTEXT, Estimate, estimate
from titancli.recipe.schema import Recipe

GIB = 2**30
ENOUGH = 0.85
"""Fraction of the estimate that a change must get below: a smaller saving may not help a run that is out
of memory."""


def memory_report(recipe: Recipe, degrees: Degrees, device: str, live: Mapping[str, float]) -> str:
    """Return the memory that was live on a rank, and `titan plan`'s estimate for such a step.

    Args:
        device: the device's name, as its vendor reports it.
        live: measured bytes by use: `parameters`, `optimizer`, and the allocator's figures.
    """
    lines = ["live:      " + _sizes(live)] if live else []
    found = _estimate(recipe, degrees, device)
    if found is not None:
        classes = {kind: size for kind, size in found.worst.classes.items() if size >= 2**20}
        lines.append(f"estimate:  {_sizes(classes)}; {_gib(found.worst.total)} in all ({found.worst.moment})")
    return "\n".join(f"  {line}" for line in lines)


def advice(recipe: Recipe, degrees: Degrees, device: str) -> str | None:
    """Return the overrides that save enough at the least cost, as typed on the command line; None if none
    is known."""
    found = _estimate(recipe, degrees, device)
    change = None if found is None else remedy(recipe, _refused(found))
    if change is None:
        return None
    slower = f", {change.slower:.0%} slower" if change.slower is not None and change.slower > 0.005 else ""
    return f"{shlex.join(change.overrides)} (estimate: {_gib(change.peak_bytes)}{slower})"


def _estimate(recipe: Recipe, degrees: Degrees, device: str) -> Estimate | None:
    try:
        return estimate(recipe, degrees, _device(device))
    except TitanError:  # the run reports an error of its own
        return None


def _device(name: str) -> Device:
    """Return the known device, or an H100 for an unknown one: the cheapest change hardly depends on it."""
    return next((device for device in DEVICES.values() if device.known_as(name)), DEVICES["H100"])


def _refused(found: Estimate) -> Estimate:
    """Return the estimate with a device just too small for it, whatever its real size."""
    memory = ENOUGH * found.worst.total + CONTEXT + found.reserve
    device = dataclasses.replace(found.work.device, memory=memory)
    return dataclasses.replace(found, work=dataclasses.replace(found.work, device=device))


def _sizes(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
