"""Print how far steps are from those of samples without padding: loss × rows × layout, the largest relative
difference of a gradient; `counts differ` where tokens, routes or biases do.

    python -m tests.ranks.padding_table ["1 rank" FSDP2 …]
"""

from __future__ import annotations

import sys

from tests.ranks import Ranks
from tests.ranks.padding import ALL, BOTH, LAYOUTS, differences, steps


def main() -> None:
    """Print the table."""
    ranks = Ranks()
    names = sys.argv[1:] or [name for name, place in LAYOUTS.items() if place.layout.config is BOTH]
    expected = ranks(1, steps, LAYOUTS["1 rank"].layout, ALL)[0]
    table: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for name in names:
        for found in ranks(LAYOUTS[name].ranks, steps, LAYOUTS[name].layout, ALL):
            for (loss, rows), own in found.items():
                here = table.setdefault((loss, rows), {}).setdefault(name, {})
                for kind, far in differences(own, expected[loss, "one by one"]).items():
                    here[kind] = max(here.get(kind, 0.0), far)
    print("| loss | rows |", " | ".join(names), "|")
    print("|---|---|", "|".join("---" for _ in names), "|")
    for (loss, rows), by_layout in table.items():
        cells = []
        for name in names:
            far = by_layout.get(name)
            exact = far and not any(far.get(kind, 0.0) for kind in ("tokens", "targets", "routes", "bias"))
            cells.append("" if far is None else f"{far['gradient']:.1e}{'' if exact else ' counts differ'}")
        print(f"| {loss} | {rows} |", " | ".join(cells), "|")
    ranks.close()


if __name__ == "__main__":
    main()
