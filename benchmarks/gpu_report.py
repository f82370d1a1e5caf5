"""The tables and pictures of `train_gpu.py`, from its raw results."""

from __future__ import annotations

from statistics import median
from typing import Any

import where_time_goes

Result = dict[str, Any]

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#17becf")
SHAPES: dict[str, dict[str, float]] = {  # matrices that are multiplied, the output among them; all parameters
    "1B": {"matrix": 1.236e9, "parameters": 1.236e9, "layers": 16, "dim": 2048},
    "3B": {"matrix": 3.212e9, "parameters": 3.212e9, "layers": 28, "dim": 3072},
    "8B": {"matrix": 7.504e9, "parameters": 8.03e9, "layers": 32, "dim": 4096},
}


def report(results: list[Result]) -> tuple[str, dict[str, str]]:
    """Return the report as Markdown, and its pictures by file name."""
    parts = [
        "| model | variant | batch | tokens/s | range | MFU | peak memory, GiB | loss |\n"
        "|---|---|---|---|---|---|---|---|\n" + "\n".join(row(group) for group in groups(results))
    ]
    pictures = {}
    for model in dict.fromkeys(result["model"] for result in results):
        mine = [result for result in results if result["model"] == model]
        if lines := beside_torchtitan(groups(mine)):
            heading = f"{model}, titan's tokens/s over torchtitan's, and its memory:"
            parts.append("\n".join([heading, "", *lines]))
        profiled = {result["variant"]: result for result in mine if "spent" in result}
        if profiled:
            tokens = max(result["rows"] * result["seq_len"] for result in profiled.values())
            seq_len = mine[0]["seq_len"]
            best = where_time_goes.ideal(SHAPES[model], tokens, seq_len) if model in SHAPES else {}
            profiles = {
                f"{name}, {result['rows']} rows": result["spent"] for name, result in profiled.items()
            }
            parts.append(f"{model}, where the step goes:\n\n" + where_time_goes.table(profiles, best))
        curves = {result["variant"]: result["losses"] for result in mine if "losses" in result}
        if curves:
            pictures[f"losses-{model}.svg"] = plot(curves, f"{model}: loss by step")
            parts.append(f"{model}, losses (losses-{model}.svg):\n\n" + loss_table(curves))
    return "\n\n".join(parts), pictures


def groups(results: list[Result]) -> list[list[Result]]:
    """The repeats of each variant of each model at each size: what ran on fewer rows is another line."""
    found: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        found.setdefault((result["model"], result["variant"], result["rows"]), []).append(result)
    return list(found.values())


def row(results: list[Result]) -> str:
    """A line of the table: the repeats of one variant at one size."""
    first = results[0]
    name = f"| {first['model']} | {first['variant']} | {first['rows']} x {first['seq_len']}"
    done = [result for result in results if "failed" not in result]
    if not done:
        return f"{name} | {first['failed'].splitlines()[-1]} | | | | |"
    rates = [result["tokens_per_second"] for result in done]
    middle = sorted(done, key=lambda result: result["tokens_per_second"])[len(done) // 2]
    utilisation = f"{middle['mfu']:.1%}" if middle["mfu"] else "—"
    memory = max(result["peak_memory_bytes"] for result in done) / 2**30
    missing = f", {len(results) - len(done)} failed" if len(done) < len(results) else ""
    spread = f"{min(rates):,.0f} to {max(rates):,.0f} of {len(done)}{missing}"
    return f"{name} | {median(rates):,.0f} | {spread} | {utilisation} | {memory:.1f} | {middle['loss']:.4f} |"


def beside_torchtitan(found: list[list[Result]]) -> list[str]:
    """Titan's recipe beside torchtitan's own, its fastest, and its fastest in no more memory."""
    done = [group for group in ([r for r in g if "failed" not in r] for g in found) if group]
    ours = [group for group in done if group[0]["variant"] == "titan"]
    if not ours:
        return []
    mine = max(ours, key=rate)
    lines = []
    for version in ("0.2.2", "0.3.0"):
        theirs = [group for group in done if group[0]["variant"].startswith(f"torchtitan {version}")]
        choices = {
            "with its own recipe": [g for g in theirs if g[0]["variant"].endswith("own")],
            "at its fastest": theirs,
            "at its fastest in no more memory": [g for g in theirs if memory(g) <= memory(mine)],
        }
        for how, among in choices.items():
            if theirs and not among:
                lines.append(f"- {version} {how}: none of its settings")
            if among:
                best = max(among, key=rate)
                what = f"{best[0]['variant']}, {best[0]['rows']} rows"
                ratio, share = rate(mine) / rate(best), memory(mine) / memory(best)
                lines.append(f"- {version} {how} ({what}): {ratio:.3f} x its speed, {share:.2f} x its memory")
    return lines


def rate(results: list[Result]) -> float:
    return median(result["tokens_per_second"] for result in results)


def memory(results: list[Result]) -> float:
    return max(result["peak_memory_bytes"] for result in results)


def loss_table(curves: dict[str, list[float | None]]) -> str:
    """Losses at a few steps; the mean of the last ten that were read, as one step alone is noisy."""
    last = max(len(curve) for curve in curves.values())
    steps = [step for step in dict.fromkeys((1, last // 4, last // 2, last)) if step]
    lines = [f"| variant | {' | '.join(f'step {step}' for step in steps)} | mean of the last 10 |"]
    lines.append("|---" * (len(steps) + 2) + "|")
    for name, curve in curves.items():
        at = [curve[step - 1] if step <= len(curve) else None for step in steps]
        read = [loss for loss in curve[-10:] if loss is not None]
        shown = ["—" if loss is None else f"{loss:.4f}" for loss in (*at, sum(read) / len(read))]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def plot(curves: dict[str, list[float | None]], title: str, width: int = 800, height: int = 420) -> str:
    """An SVG of losses by step; the legend is beside the lines."""
    read = [loss for curve in curves.values() for loss in curve if loss is not None]
    low, high = min(read), max(read)
    steps = max(len(curve) for curve in curves.values())
    left, top, right, bottom = 50, 30, width - 210, height - 30

    def place(step: float, loss: float) -> str:
        x = left + (right - left) * step / max(1, steps - 1)
        return f"{x:.1f},{bottom - (bottom - top) * (loss - low) / ((high - low) or 1):.1f}"

    text = '<text x="{}" y="{}" font-size="12" fill="{}">{}</text>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="Arial">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text.format(left, 18, "black", title),
        text.format(4, top + 4, "black", f"{high:.2f}"),
        text.format(4, bottom, "black", f"{low:.2f}"),
        text.format(right - 20, bottom + 18, "black", f"{steps}"),
        f'<path d="M{left},{top}V{bottom}H{right}" fill="none" stroke="black"/>',
    ]
    for number, (name, curve) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        points = " ".join(place(step, loss) for step, loss in enumerate(curve) if loss is not None)
        dashes = ' stroke-dasharray="4 2"' if number >= len(COLORS) else ""
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}"{dashes}/>')
        lines.append(text.format(right + 10, top + 16 * number, color, name))
    return "\n".join([*lines, "</svg>\n"])
