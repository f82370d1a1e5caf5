"""Curves as SVG, drawn by matplotlib. Colors are CSS variables: the page has a light and a dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_report.view import Curve, limits
from titancli.observe.console import short

COLORS = 8
"""Number of colors; with more runs they repeat, dashed and then dotted."""
DASHES: Any = ("-", (0, (4, 2)), (0, (1, 1.5)))
"""Line styles of the first `COLORS` runs, the next, and those after."""
TEXT, GRID, MARK, ODD = "#010203", "#010204", "#010205", "#010206"
"""Placeholders for CSS variables: `#0102xx` becomes `var(--pxx)`."""
MARGIN = {"left": 46, "right": 10, "top": 10, "bottom": 22}
SETTINGS: Any = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "axes.linewidth": 0.6,
}


@dataclass(frozen=True)
class Plot:
    """An SVG and its axes, which the page needs to show the values under the pointer."""

    svg: str
    width: int
    height: int
    x: tuple[float, float]
    """The axis from left to right, in data units; `y` from bottom to top."""
    y: tuple[float, float]


def series_color(run: int) -> str:
    return f"#0102{16 + run % COLORS:02x}"


def plot(
    curves: Sequence[Curve],
    *,
    width: int,
    height: int,
    marks: Sequence[float] = (),
    percent: bool = False,
    dots: bool = False,
) -> Plot:
    """Draw one metric of several runs.

    Args:
        width, height: in CSS pixels, at the page's original size.
        marks: positions on the horizontal axis that get a dotted line (resumes).
        dots: mark each point, since there are few.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    # Internal references of an SVG are hashes, which must differ between two sizes of a plot.
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": str(width)}):
        figure = Figure(figsize=(width / 72, height / 72))
        left, right = MARGIN["left"] / width, 1 - MARGIN["right"] / width
        bottom, top = MARGIN["bottom"] / height, 1 - MARGIN["top"] / height
        axes = figure.add_axes((left, bottom, right - left, top - bottom))
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        _limits(axes, curves)
        for one in curves:
            _draw(axes, one, dots)
        for place in marks:
            axes.axvline(place, color=MARK, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, pad=5, labelcolor=TEXT)
        axes.xaxis.set_major_locator(MaxNLocator(max(2, width // 90), integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(max(3, height // 45), min_n_ticks=3))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{100 * value:.3g}%" if percent else label(value))
        )
        for one in curves:
            if one.odd:
                axes.plot(
                    one.odd,
                    [0.03] * len(one.odd),
                    "x",
                    color=ODD,
                    markersize=4,
                    markeredgewidth=1.1,
                    transform=axes.get_xaxis_transform(),
                    clip_on=False,
                )
        drawn = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(drawn, metadata={"Date": None, "Creator": None})
        (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    svg = _tidy(drawn.getvalue().decode())
    return Plot(svg, width, height, (float(x0), float(x1)), (float(y0), float(y1)))


def _draw(axes: Any, one: Curve, dots: bool) -> None:
    color = series_color(one.run)
    if not one.x:
        return
    bottom, top = axes.get_ylim()  # a first value beyond them is drawn at the edge: nothing on the page clips
    x, y, low, high = _inside(one, bottom, top)
    if one.low is not one.y and one.low != one.y:
        axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0, zorder=2)
    marker = "o" if dots or len(one.x) == 1 else None
    axes.plot(
        x,
        y,
        color=color,
        linewidth=1.6,
        linestyle=DASHES[one.run // COLORS % len(DASHES)],
        marker=marker,
        markersize=3.2,
        solid_joinstyle="round",
        solid_capstyle="round",
        zorder=3,
    )


def _inside(one: Curve, bottom: float, top: float) -> tuple[list[float], ...]:
    """Return a curve whose first point is moved to the edge that its first segment crosses."""
    x, y, low, high = list(one.x), list(one.y), list(one.low), list(one.high)
    if not bottom <= y[0] <= top and len(x) > 1:
        edge = min(max(y[0], bottom), top)
        x[0] += (x[1] - x[0]) * (edge - y[0]) / (y[1] - y[0])
        y[0] = edge
    return x, y, *([min(max(value, bottom), top) for value in values] for values in (low, high))


def _limits(axes: Any, curves: Sequence[Curve]) -> None:
    """Set the axes' limits, with a margin above and below, also for a flat curve or a single point."""
    places = [place for one in curves for place in (*one.x, *one.odd)]
    lowest, highest, _ = limits(curves)
    room = (highest - lowest) * 0.06 or abs(highest) * 0.1 or 0.5
    axes.set_ylim(0.0 if 0 <= lowest < room else lowest - room, highest + room)
    first, last = min(places, default=0.0), max(places, default=1.0)
    axes.set_xlim(first, last if last > first else first + 1)


def label(value: float) -> str:
    """Format a number beside an axis: `0.0003`, `2.5`, `12k`."""
    return f"{'-' if value < 0 else ''}{short(abs(value))}" if abs(value) >= 1000 else f"{value:.4g}"


def _tidy(svg: str) -> str:
    """Return only the `<svg>` element, for a page that has several: no ids, colors as variables, short
    numbers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</defs>", "", svg, flags=re.DOTALL)
    # Clipping refers to ids, which would have to be unique on the page; the limits contain every curve.
    svg = re.sub(r'<clipPath.*?</clipPath>| clip-path="[^"]*"', "", svg, flags=re.DOTALL)
    svg = re.sub(r"#0102([0-9a-f]{2})", r"var(--p\1)", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r" font-family: [^;]*;| transform=\"rotate\(-0 [^\"]*\"", "", svg)
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\d\.\d)\d+", r"\1", path[0]), svg)
    head, _, body = svg.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    head = f'<svg {box[0] if box else ""} aria-hidden="true"'
    svg = re.sub(r"<g>\s*</g>|<g/>", "", f"{head}>{body}")
    return re.sub(r"\s*\n\s*", "\n", svg).strip()
