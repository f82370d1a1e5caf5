"""Curves for a terminal, in braille dots: two columns and four rows per character."""

from __future__ import annotations

import math
from collections.abc import Sequence

from titan_report.plots import label
from titan_report.view import Curve, limits

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a character, by column and row (Unicode, Braille Patterns)."""
EMPTY = 0x2800


def chart(curves: Sequence[Curve], *, width: int, height: int) -> list[list[tuple[str, int | None]]]:
    """Return the lines of a chart, each as pieces of text with the run that they belong to (None: axes).

    A character shared by several runs belongs to the last.

    Args:
        width, height: in characters, including the axes.
    """
    values = [value for one in curves for value in (*one.low, *one.high)]
    places = [place for one in curves for place in one.x]
    if not values:
        return []
    first, last = min(places), max(places)
    low, high, _ = limits(curves)
    marks = [label(high), label(low)]
    left = max(map(len, marks)) + 1
    columns, rows = max(1, width - left - 1), max(1, height - 1)
    cells: dict[tuple[int, int], tuple[int, int]] = {}

    def dot(x: float, y: float, run: int) -> None:
        across = round((x - first) / ((last - first) or 1) * (2 * columns - 1))
        y = min(max(y, low), high)  # a first value far from all others
        down = round((high - y) / ((high - low) or 1) * (4 * rows - 1))
        cell = (down // 4, across // 2)
        bits = cells.get(cell, (0, run))[0] | DOTS[across % 2][down % 4]
        cells[cell] = (bits, run)

    for one in curves:
        before = None
        for x, y, bottom, top in zip(one.x, one.y, one.low, one.high, strict=True):
            points = [(x, y), (x, bottom), (x, top)]
            if before is not None:  # connected, so that a steep curve has no gaps
                steps = 2 * columns
                points += (
                    [
                        (before[0] + (x - before[0]) * n / steps, before[1] + (y - before[1]) * n / steps)
                        for n in range(1, steps)
                    ]
                    if len(one.x) < steps
                    else []
                )
            for point in points:
                dot(*point, one.run)
            before = (x, y)
    lines = []
    for row in range(rows):
        mark = marks[0] if row == 0 else marks[1] if row == rows - 1 else ""
        pieces: list[tuple[str, int | None]] = [(f"{mark:>{left - 1}} │", None)]
        for column in range(columns):
            bits, run = cells.get((row, column), (0, -1))
            pieces.append((chr(EMPTY + bits) if bits else " ", run if bits else None))
        lines.append(pieces)
    begin, end = label(math.floor(first)), label(math.ceil(last))
    lines.append([(f"{'':{left}}{begin}{end:>{max(1, columns + 1 - len(begin))}}", None)])
    return lines
