"""The output of a run without the panel: plain lines, or one that updates, or JSON Lines. Torch-free.

It draws events (see `titancli.observe.events`), so it works the same inside the worker and, for runs of
several ranks, in the command that reads their event log.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from titancli.process import OutputLog
from titancli.terminal import clean

UNKNOWN = "—"


class Console:
    """Draws events on a text stream; if `quiet`, warnings alone."""

    def __init__(self, stream: TextIO | OutputLog, *, live: bool | None = None, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet
        self._live = stream.isatty() if live is None else live
        self._status = ""

    def __call__(self, event: dict[str, Any]) -> None:
        event = clean(event)
        kind = event["event"]
        if self._quiet and (kind != "log" or event["level"] in ("debug", "info")):
            return
        if kind == "step":
            self._show_step(event)
        elif kind == "run_start":
            self._line(start_line(event))
        elif kind == "validation":
            self._line(validation_line(event))
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
        """Leave the status line on screen and move below it."""
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
        self._stream.write(json.dumps(event) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def start_line(event: dict[str, Any]) -> str:
    degrees = {name: degree for name, degree in (event.get("mesh") or {}).items() if degree != 1}
    mesh = f" ({', '.join(f'{name} {degree}' for name, degree in degrees.items())})" if degrees else ""
    world = event.get("world") or 1
    ranks = f"{world} rank{'s' if world != 1 else ''}"
    origin = f", from {Path(event['checkpoint']).name}" if event.get("checkpoint") else ""
    epochs = f", {event['epochs']}" if event.get("epochs") else ""
    return f"training on {event.get('device')}, {ranks}{mesh}{origin}{epochs}"


def log_line(event: dict[str, Any]) -> str:
    """Format a log message, with its level if that is above INFO."""
    return event["message"] if event["level"] == "info" else f"{event['level']}: {event['message']}"


def status_line(event: dict[str, Any], width: int | None = None) -> str:
    """Format a step: `step 120/1000  loss 3.2141  grad norm 0.872  lr 3.00e-04  21.3k tokens/s  ETA 0:42`.

    What matters least is left out where it is longer than `width`.
    """
    metrics = numbers(event)
    parts = {"step": f"step {event['step']}/{event['steps']}"}
    for name in FIGURES:
        if (metrics.get(name) is not None and (metrics[name] or name not in COUNTS)) or name in ALWAYS:
            parts[name] = figure(metrics, name)
    for name in ("lr", "memory_gib", "grad_norm", "mfu", "tokens_per_second"):
        if width is not None and len("  ".join(parts.values())) > width:
            parts.pop(name, None)
    return "  ".join(parts.values())[:width]


def validation_line(event: dict[str, Any]) -> str:
    """Format an evaluation: `validation at step 100: books loss 2.3412, perplexity 10.394`."""
    return f"validation at step {event['step']}: {'; '.join(validation_figures(numbers(event)))}"


def validation_figures(metrics: Mapping[str, float | None]) -> list[str]:
    """Return what metrics say of each dataset of `[validation]`: `books loss 2.3412, perplexity 10.394`."""
    sets: dict[str, list[str]] = {}
    for name, number in metrics.items():
        if (parts := name.split("/", 2))[0] == "validation" and len(parts) == 3 and number is not None:
            form = ".4f" if parts[2] == "loss" else ".3f" if parts[2] == "perplexity" else ".4g"
            sets.setdefault(parts[1], []).append(f"{parts[2].replace('_', ' ')} {number:{form}}")
    return [f"{name} {', '.join(figures)}" for name, figures in sets.items()]


def numbers(event: dict[str, Any]) -> dict[str, float | None]:
    """Return the metrics of a step's event as numbers; NaN and Infinity are stored as text."""
    return {name: None if value is None else float(value) for name, value in event["metrics"].items()}


def figure(metrics: Mapping[str, float | None], name: str) -> str:
    """Format a metric: `grad norm 0.872`; a missing one as a dash."""
    return FIGURES[name][0].format(value(metrics, name))


def value(metrics: Mapping[str, float | None], name: str) -> str:
    """Format a metric's value: `0.872`."""
    number, form = metrics.get(name), FIGURES[name][1]
    if number is None:
        return UNKNOWN
    return form(number) if callable(form) else format(number, form)


def duration(seconds: float) -> str:
    """`0:42`, `1:02:03`, `3d 4:05:06`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days}d {clock}" if days else clock


def short(value: float) -> str:
    """`21.3k`, `1.23M`."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}" if value / factor < 100 else f"{value / factor:.0f}{unit}"
    return f"{value:.0f}"


FIGURES: dict[str, tuple[str, str | Callable[[float], str]]] = {
    "epoch": ("epoch {}", ".2f"),
    "loss": ("loss {}", ".4f"),
    "reward_accuracy": ("accuracy {}", ".3f"),
    "grad_norm": ("grad norm {}", ".3f"),
    "lr": ("lr {}", ".2e"),
    "reward": ("reward {}", ".3f"),
    "solved": ("solved {}", ".0%"),
    "eval_solved": ("eval {}", ".0%"),
    "reward_failed": ("{} rewards failed", ".0f"),
    "skipped_steps": ("{} skipped", ".0f"),
    "tokens_per_second": ("{} tokens/s", short),
    "mfu": ("MFU {}", ".1%"),
    "memory_gib": ("{} GiB", ".1f"),
    "eta_seconds": ("ETA {}", duration),
}
"""The metrics that people are shown, in the order of the status line."""
COUNTS = ("reward_failed", "skipped_steps")
"""Not shown while they are 0."""
ALWAYS = ("eta_seconds",)
"""Shown before they are known."""
