"""A plan as text: a drawing of the mesh, and figures in columns."""

from __future__ import annotations

import shlex
from typing import Any

GIB = 2**30
WIDTH = 8
"""Maximum number of ranks listed in a row of the drawing."""
ROWS = 3
"""Rows drawn from the top; the last row follows."""
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
INDENT = " " * 14
SAME = 5e-4
"""Difference in speed below which two plans count as equally fast."""


def as_text(plan: dict[str, Any]) -> str:
    """Render the document of `titan plan --json` as text."""
    lines = [_row("model", _model(plan)), *_mesh(plan)]
    if plan["memory"]:
        lines += [_row("flops", f"{plan['compute']['flops_per_token']:.4g} per token, forward and backward")]
        for part in (_memory, _host, _copies, _collectives, _pipeline, _speed):
            lines += part(plan)
    lines += [_row("note" if not i else "", note) for i, note in enumerate(plan["notes"])]
    if plan["memory"]:
        lines += _verdict(plan)
    return "\n".join(lines)


def _row(label: str, text: str) -> str:
    return f"{label:<14}{text}".rstrip()


def _model(plan: dict[str, Any]) -> str:
    numbers = plan["parameters"]
    if not numbers:
        return str(plan["model"])
    return f"{plan['model']}, {numbers['model']:,} parameters; {numbers['rank']:,} per rank"


# ---------------------------------------------------------------------------------------------- mesh


def _mesh(plan: dict[str, Any]) -> list[str]:
    """Draw the ranks in order, the innermost dimension along a row."""
    mesh, world = plan["mesh"], plan["world"]
    degrees = [(name, mesh[name]) for name in DIMENSIONS if mesh[name] > 1]
    title = " x ".join(f"{name} {degree}" for name, degree in degrees) or "one device"
    if mesh["ep"] > 1:
        title += f", experts over ep {mesh['ep']}"
    device = "CPU" if plan["gpu"] == "cpu" else plan["gpu"]
    lines = [_row("mesh", f"{world:,} x {device}: {title}")]
    if not degrees:
        return lines
    *outer, (inner, length) = degrees
    rows = world // length
    shown = list(range(rows)) if rows <= ROWS + 1 else [*range(ROWS), None, rows - 1]
    for row in shown:
        if row is None:
            lines.append(f"{INDENT}…")
            continue
        place, left = [], row
        for name, degree in reversed(outer):
            left, at = divmod(left, degree)
            place.append(f"{name} {at}")
        where = ", ".join(reversed(place))
        lines.append(f"{INDENT}{where:<{_widest(outer)}}[{_ranks(row * length, length)}] {inner}".rstrip())
    return lines


def _widest(outer: list[tuple[str, int]]) -> int:
    return sum(len(f"{name} {degree - 1}, ") for name, degree in outer)


def _ranks(first: int, count: int) -> str:
    if count <= WIDTH:
        return " ".join(str(first + i) for i in range(count))
    return f"{first} {first + 1} {first + 2} … {first + count - 1}"


# ------------------------------------------------------------------------------------------- figures


def _memory(plan: dict[str, Any]) -> list[str]:
    memory = plan["memory"]
    of = f" of {_gib(memory['limit_bytes'])} usable" if memory["limit_bytes"] else ""
    lines = [_row("memory", f"{_gib(memory['peak_bytes'])}{of} per rank, peak in: {memory['moment']}")]
    lines += [f"{INDENT}{kind:<16}{_gib(size):>12}" for kind, size in memory["classes"].items() if size]
    if len(memory["ranks"]) > 1:
        each = " ".join(f"{rank['peak_bytes'] / GIB:.1f}" for rank in memory["ranks"])
        lines.append(f"{INDENT}GiB on the ranks of the pipeline: {each}")
    return lines


def _host(plan: dict[str, Any]) -> list[str]:
    one = plan["host"]
    if not one:
        return []
    ways = f"{_gib(one['to_device_bytes'])} to the device, {_gib(one['to_host_bytes'])} back per step"
    if one["seconds"] is not None and one["exposed_seconds"] is not None:
        hidden = max(0.0, one["seconds"] - one["exposed_seconds"])
        ways += f": {one['seconds']:.3g} s, {hidden:.3g} s of them overlap with compute"
    return [_row("host", f"{_gib(one['bytes'])} per rank in the host's memory"), f"{INDENT}{ways}"]


def _copies(plan: dict[str, Any]) -> list[str]:
    one = plan["copies"]
    if not one:
        return []
    count = one["nodes"]
    where = f"each of {count} nodes" if count > 1 else "the node"
    return [_row("copies", f"{_gib(one['bytes_per_node'])} in the memory of {where}: checkpoint.copies")]


def _collectives(plan: dict[str, Any]) -> list[str]:
    lines = []
    for number, one in enumerate(plan["collectives"]):
        took = "" if one["seconds"] is None else f"  {1000 * one['seconds']:>9,.1f} ms"
        name = f"{one['over']}: {one['name']} over {one['ranks']}"
        text = f"{name:<44}{_gib(one['bytes']):>12} per step{took} ({one['link']})"
        lines.append(_row("sent per rank" if not number else "", text))
    return lines


def _pipeline(plan: dict[str, Any]) -> list[str]:
    one = plan["pipeline"]
    if not one:
        return []
    text = f"{one['schedule']}, {one['stages']} stages, {one['microbatches']} micro-batches per step"
    return [_row("pipeline", f"{text}; a rank waits {one['bubble']:.1%} of the time")]


def _speed(plan: dict[str, Any]) -> list[str]:
    one = plan["speed"]
    if not one:
        return [_row("speed", "not estimated: no data sheet is known for this device")]
    parts = {
        "arithmetic": one["arithmetic"],
        "exposed collectives": one["waiting"],
        "overlapped collectives": one["beside"],
        "exposed host copies": one["host"],
        "optimizer": one["optimizer"],
    }
    shares = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items() if seconds)
    return [
        _row("speed", f"at most {one['tokens_per_second']:,.0f} tokens/s per rank, {one['mfu']:.0%} MFU"),
        f"{INDENT}a step of {one['step']:.3g} s or more: {shares}",
    ]


def _verdict(plan: dict[str, Any]) -> list[str]:
    verdict, memory = plan["verdict"], plan["memory"]
    if verdict["fits"] is None:
        return [_row("verdict", "fits if each rank has that much memory")]
    if verdict["fits"]:
        left = memory["limit_bytes"] - memory["peak_bytes"]
        return [_row("verdict", f"fits, with {_gib(left)} to spare")]
    over = memory["peak_bytes"] - memory["limit_bytes"]
    lines = [_row("verdict", f"does not fit: {_gib(over)} too much")]
    change = verdict["change"]
    if change is None:
        lines.append(f"{INDENT}none of the changes that were tried makes it fit")
    else:
        cost = ""
        if (share := change["slower"]) is not None:
            cost = f", {abs(share):.1%} {'slower' if share > 0 else 'faster'}"
            if abs(share) < SAME:
                cost = ", as fast"
        lines.append(f"{INDENT}cheapest of the changes that were tried: {_gib(change['peak_bytes'])}{cost}")
        lines.append(f"{INDENT}  {shlex.join(change['overrides'])}")
    if verdict["ranks"]:
        ranks = f"{verdict['ranks']:,} ranks, with a larger mesh.dp_shard"
        lines.append(f"{INDENT}without changes it fits on {ranks}")
    return lines


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:,.2f} MiB"
