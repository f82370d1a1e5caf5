"""What is seen of a run without the panel: plain lines, or one that updates, or JSON Lines. Torch-free.

It draws events (see `titancli.observe.events`), so it works the same inside the worker and, for runs of
several ranks, in the command that reads their event log.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, TextIO

UNKNOWN = "—"


class Console:
    """Draws events on a text stream; if `quiet`, warnings alone."""

    def __init__(self, stream: TextIO, *, live: bool | None = None, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet
        self._live = stream.isatty() if live is None else live
        self._status = ""

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if self._quiet and kind != "log":
            return
        if kind == "step":
            self._show_step(event)
        elif kind == "run_start":
            self._line(start_line(event))
        elif kind == "checkpoint":
            self._line(f"saved {Path(event['path']).name}")
        elif kind == "log":
            self._line(log_line(event))
        elif kind == "run_end":
            self.close()

    def _show_step(self, event: dict[str, Any]) -> None:
        if not self._live:
            self._line(status_line(event))
            return
        # One column is left free: a terminal that wraps at the last one would scroll.
        self._status = status_line(event, shutil.get_terminal_size().columns - 1)
        self._write(f"\r\x1b[K{self._status}")

    def _line(self, text: str) -> None:
        if self._live and self._status:
            self._write(f"\r\x1b[K{text}\n{self._status}")
        else:
            self._write(f"{text}\n")

    def close(self) -> None:
        """Leave the status line standing and go below it."""
        if self._live and self._status:
            self._write("\n")
        self._status = ""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except UnicodeEncodeError:  # a terminal that has no dash
            self._stream.write(text.encode("ascii", "replace").decode())
            self._stream.flush()


class JsonLines:
    """Writes events as JSON Lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: dict[str, Any]) -> None:
        self._stream.write(json.dumps(event, ensure_ascii=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def start_line(event: dict[str, Any]) -> str:
    degrees = {name: degree for name, degree in (event.get("mesh") or {}).items() if degree != 1}
    mesh = f" ({', '.join(f'{name} {degree}' for name, degree in degrees.items())})" if degrees else ""
    world = event.get("world") or 1
    ranks = f"{world} rank{'s' if world != 1 else ''}"
    origin = f", from {Path(event['checkpoint']).name}" if event.get("checkpoint") else ""
    return f"training on {event.get('device')}, {ranks}{mesh}{origin}"


def log_line(event: dict[str, Any]) -> str:
    """What titan has to say of a run; only what is more than a notice says how grave it is."""
    return event["message"] if event["level"] == "info" else f"{event['level']}: {event['message']}"


def status_line(event: dict[str, Any], width: int | None = None) -> str:
    """E.g. `step 120/1000  loss 3.2141  grad norm 0.872  lr 3.00e-04  21.3k tokens/s  MFU —  ETA 0:42`.

    What matters least is left out where it is longer than `width`.
    """
    metrics = {name: number(value) for name, value in event["metrics"].items()}
    parts = {"step": f"step {event['step']}/{event['steps']}"}
    for name, label, form in (
        ("loss", "loss", ".4f"),
        ("reward_accuracy", "accuracy", ".3f"),
        ("grad_norm", "grad norm", ".3f"),
        ("lr", "lr", ".2e"),
    ):
        if metrics.get(name) is not None:
            parts[name] = f"{label} {metrics[name]:{form}}"
    if metrics.get("reward") is not None:
        parts["reward"] = f"reward {metrics['reward']:.3f}"
        parts["solved"] = f"solved {metrics.get('solved') or 0.0:.0%}"
    if metrics.get("eval_solved") is not None:
        parts["eval_solved"] = f"eval {metrics['eval_solved']:.0%}"
    if failed := metrics.get("reward_failed"):
        parts["reward_failed"] = f"{failed:.0f} rewards failed"
    if metrics.get("val_loss") is not None:
        parts["val_loss"] = f"val loss {metrics['val_loss']:.4f}"
    if metrics.get("val_perplexity") is not None:
        parts["val_perplexity"] = f"perplexity {metrics['val_perplexity']:.3f}"
    if skipped := metrics.get("skipped_steps"):
        parts["skipped"] = f"{skipped:.0f} skipped"
    if (rate := metrics.get("tokens_per_second")) is not None:
        parts["rate"] = f"{short(rate)} tokens/s"
    mfu, memory, eta = (metrics.get(name) for name in ("mfu", "memory_gib", "eta_seconds"))
    parts["mfu"] = f"MFU {mfu:.1%}" if mfu is not None else f"MFU {UNKNOWN}"
    if memory is not None:
        parts["memory"] = f"{memory:.1f} GiB"
    parts["eta"] = f"ETA {duration(eta) if eta is not None else UNKNOWN}"
    for name in ("lr", "memory", "grad_norm", "mfu", "rate"):
        if width is not None and len("  ".join(parts.values())) > width:
            parts.pop(name, None)
    return "  ".join(parts.values())[:width]


def duration(seconds: float) -> str:
    """`0:42`, `1:02:03`, `3d 4:05:06`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days}d {clock}" if days else clock


def number(value: Any) -> float | None:
    """A metric of an event; NaN and Infinity come as text."""
    return float(value) if value is not None else None


def short(value: float) -> str:
    """`21.3k`, `1.23M`."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}" if value / factor < 100 else f"{value / factor:.0f}{unit}"
    return f"{value:.0f}"
