"""The rows that the tests of recipes have filled in, printed when they have ended."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """What a recipe asks of one device."""

    name: str
    launches: int
    """Kernels of a step, the third or a later one."""
    waits: list[str]
    """Waits of the host after the second step."""
    peak: int
    """Bytes that torch's allocator has given out at most, after the first step and without cuBLAS's."""
    plan: int | None
    """The same of `titan plan`; None: it plans no such run."""
    done: str
    """What the row has done: steps, saves, resumes, exports."""

    @property
    def off(self) -> float:
        """The peak relative to the plan, minus one."""
        return self.peak / self.plan - 1 if self.plan else 0.0


ROWS: list[Row] = []


def lines() -> list[str]:
    """Return the table in Markdown."""
    head = "| recipe | launches a step | waits | allocator, MiB | plan, MiB | off | done |"
    found = [head, "|---|---|---|---|---|---|---|"]
    for row in sorted(ROWS, key=lambda row: row.name):
        plan = f"{row.plan / MIB:,.1f} | {row.off:+.1%}" if row.plan else "none |"
        asked = f"{row.launches:,} | {len(row.waits)} | {row.peak / MIB:,.1f}"
        found.append(f"| {row.name} | {asked} | {plan} | {row.done} |")
    return found
