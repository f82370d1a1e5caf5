"""`titan plan --check`: compute a step of one rank of each pipeline stage, without memory. Imports torch
late."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

GIB = 2**30


def check(recipe: Recipe, world: int, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the result of `titancli.engine.dry_run` as plain JSON, with the seconds and the memory that it
    took.

    Raises:
        TitanError: a step fails; the message names the rank.
    """
    began = time.perf_counter()
    from titancli.engine.dry_run import dry_run
    from titancli.planning.stand_in import on_a_cpu

    found = asdict(dry_run(recipe, world, ranks))
    computed = _computed(on_a_cpu(recipe)[0], world)
    for rank in found["ranks"]:
        rank["computed_peak_bytes"] = computed[rank["place"]["pp"]] if computed else None
    return {**found, "seconds": time.perf_counter() - began, "peak_rss_bytes": _peak_rss()}


def _computed(recipe: Recipe, world: int) -> list[int] | None:
    """Return the peak that `titan plan` computes for such a step, by rank of the pipeline; None for a
    model that it cannot estimate."""
    from titancli.observe.peaks import DEVICES
    from titancli.planning.estimate import estimate

    found = estimate(recipe, recipe.degrees(world), DEVICES["cpu"])
    return None if found is None else [round(rank.total - rank.classes["frozen"]) for rank in found.ranks]


def _peak_rss() -> int | None:
    """Return the peak memory of this process; None if the platform does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def as_text(facts: dict[str, Any]) -> str:
    """Return the facts as text."""
    ranks, of = facts["ranks"], f"{facts['world']:,} rank{'s' if facts['world'] > 1 else ''}"
    took = f"{facts['seconds']:.1f} s"
    if facts["peak_rss_bytes"]:
        took += f" and {facts['peak_rss_bytes'] / GIB:.2f} GiB of memory"
    names = ("parameter", "gradient", "optimizer", "peak", "computed_peak")
    lines = [
        f"check: {len(ranks)} of {of} completed a step without errors, in {took}",
        f"  {'rank':<16}"
        + "".join(f"{name:>14}" for name in ("parameters", "gradients", "optimizer", "peak", "computed")),
    ]
    staged = any(rank["place"]["pp"] for rank in ranks)
    for rank in ranks:
        who = f"{rank['rank']} (pp {rank['place']['pp']})" if staged else str(rank["rank"])
        sizes = [rank[f"{name}_bytes"] for name in names]
        cells = [f"{size / GIB:>10.3f} GiB" if size is not None else f"{'-':>14}" for size in sizes]
        lines.append(f"  {who:<16}{''.join(cells)}")
    lines.append(
        "  measured in the step and as computed in advance (the last column); without compile, with CPU "
        "kernels"
    )
    if facts["left_out"]:
        lines.append(f"  not covered: {'; '.join(facts['left_out'])}")
    return "\n".join(lines)
