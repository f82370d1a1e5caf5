"""The live panel: the view of a run at a terminal. Torch-free; rich is imported when it first draws.

It draws events (see `titancli.observe.events`), as `Console` does, so it works in place and under torchrun.
The cursor rests on an empty line above the panel: any other output appears there and not inside, and drawing
again begins by erasing everything below the cursor, so a resized terminal leaves no remains.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from titancli.observe.console import (
    Console,
    duration,
    figure,
    log_line,
    numbers,
    start_line,
    status_line,
    validation_figures,
    validation_line,
    value,
)
from titancli.observe.summary import seconds_since
from titancli.process import Tee
from titancli.terminal import clean

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import ConsoleOptions, RenderableType

SECONDS = 0.25
"""Minimum seconds between two drawings of a step."""
WIDTH = 100
SMALLEST = (60, 9)
"""Columns and lines below which one status line replaces the panel."""
ROWS = 7
"""Lines of a panel without what was evaluated, and the one below it."""
BLOCKS = "▁▂▃▄▅▆▇█"
ERASE = "\r\x1b[J"


def watcher_for(stream: TextIO) -> Panel | Console:
    """Return the view of a run on `stream`: the panel on a terminal that can show it, else lines.

    Under `titan -q`, which sets the level of titan's logger to WARNING, it draws warnings alone.
    """
    if logging.getLogger("titancli").level == logging.WARNING:
        return Console(stream, live=False, quiet=True)
    plain = os.environ.get("NO_COLOR") or os.environ.get("CI") or os.environ.get("TERM", "dumb") == "dumb"
    if plain or not stream.isatty():
        return Console(stream, live=False)
    if (stream.encoding or "").lower().replace("-", "") != "utf8":
        return Console(stream, live=True)
    return Panel(stream)


class _Bar:
    """A bar whose two parts differ without colours, unlike those of rich."""

    def __init__(self, share: float) -> None:
        self._share = min(max(share, 0.0), 1.0)

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        done = int(self._share * options.max_width)
        yield Text.assemble(("━" * done, "bar.complete"), ("╌" * (options.max_width - done), "bar.back"))


class Panel:
    """Draws events as one panel below everything that is printed. Any thread may call it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._title = "training"
        self._step: dict[str, Any] | None = None
        self._losses: deque[tuple[int, float]] = deque(maxlen=512)
        """Losses with their steps."""
        self._saved: tuple[str, str] | None = None
        """A checkpoint's name, and when it was saved."""
        self._replaying = False
        self._validated: dict[str, Any] | None = None
        self._drawn_at = float("-inf")
        self._standing = False
        self._mutex = threading.RLock()
        self._streams: dict[str, Above] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        event = clean(event)
        kind = event["event"]
        with self._mutex:
            if kind == "run_start":
                self._title = start_line(event)
                # After a restart from an earlier checkpoint, what came after it is void.
                while self._losses and self._losses[-1][0] > event["step"]:
                    self._losses.pop()
                self.above(f"{self._title}\n")
            elif kind == "step":
                self._step = event
                if (loss := numbers(event).get("loss")) is not None:
                    self._losses.append((event["step"], loss))
                if time.monotonic() - self._drawn_at >= SECONDS:
                    self._draw()
            elif kind == "validation":
                self._validated = event
                self.above(f"{validation_line(event)}\n")
            elif kind == "checkpoint":
                self._saved = Path(event["path"]).name, event["time"]
                self._draw()
            elif kind == "log":
                self.above(f"{log_line(event)}\n")
            elif kind == "run_end" and not self._replaying:
                self.close()

    def replay(self, events: Iterable[dict[str, Any]]) -> None:
        """Process past events, and draw once."""
        with self._mutex:
            self._replaying = True
            try:
                for event in events:
                    self(event)
            finally:
                self._replaying = False
            self._draw()

    def above(self, text: str) -> None:
        """Print whole lines above the panel."""
        with self._mutex:
            self._write(f"{ERASE if self._standing else ''}{text}")
            if self._standing:
                self._draw()

    def close(self) -> None:
        """Leave the last panel on screen and move below it."""
        with self._mutex:
            for name, above in self._streams.items():
                if getattr(sys, name) is above:
                    setattr(sys, name, above.stream)
            ended, self._streams = list(self._streams.values()), {}
            for above in ended:
                above.finish()
            if self._standing:
                self._write(f"{ERASE}{chr(10).join(self._lines())}\n")
            self._standing, self._step = False, None

    # ---------------------------------------------------------------------------------------- drawing

    def _draw(self) -> None:
        if self._step is None or self._replaying:
            return
        if not self._standing:
            self._take_streams()
        lines = ["", *self._lines()]
        self._write(f"{ERASE}{chr(10).join(lines)}\r\x1b[{len(lines) - 1}A")
        self._standing = True
        self._drawn_at = time.monotonic()

    def _take_streams(self) -> None:
        """Redirect this process's other output on the terminal to the space above the panel."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._streams[name] = Above(self, stream)
                setattr(sys, name, self._streams[name])

    def _lines(self) -> list[str]:
        """Return the panel for the terminal's present size; one column stays free, or a terminal might wrap
        at the last."""
        if self._step is None:
            return []
        columns, rows = shutil.get_terminal_size()
        if columns < SMALLEST[0] or rows < SMALLEST[1]:
            return [status_line(self._step, columns - 1)]
        from rich.console import Console as Rich

        width = min(columns - 1, WIDTH)
        drawn = io.StringIO()
        Rich(file=drawn, width=width, force_terminal=True, highlight=False).print(
            self._panel(self._step, width)
        )
        return drawn.getvalue().rstrip("\n").split("\n")

    def _panel(self, event: dict[str, Any], width: int) -> RenderableType:
        from rich.panel import Panel as Box
        from rich.table import Table
        from rich.text import Text

        step, steps = event["step"], event["steps"]
        metrics = numbers(event)
        progress = Table.grid(padding=(0, 2), expand=True)
        progress.add_column(ratio=1)
        progress.add_row(
            _Bar(step / max(steps, 1)),
            Text(f"{step / max(steps, 1):.0%}"),
            Text(figure(metrics, "eta_seconds"), style="bold"),
        )
        loss = Text.assemble(
            "loss ",
            (value(metrics, "loss"), "bold cyan"),
            "  ",
            (sparkline([loss for _, loss in self._losses], width - 54), "cyan"),
        )
        table = Table.grid(padding=(0, 3), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        table.add_row(loss, figure(metrics, "grad_norm"), figure(metrics, "lr"))
        mfu = "" if metrics.get("mfu") is None else figure(metrics, "mfu")
        table.add_row(figure(metrics, "tokens_per_second"), mfu, figure(metrics, "memory_gib"))
        skipped = f", {figure(metrics, 'skipped_steps')}" if metrics.get("skipped_steps") else ""
        body = Table.grid(expand=True)
        body.add_row(progress)
        body.add_row(table)
        if self._validated is not None:
            at = f"(step {self._validated['step']:,})"
            room = max(0, shutil.get_terminal_size().lines - ROWS)
            for words in validation_figures(numbers(self._validated))[:room]:
                body.add_row(Text(f"validation {words} {at}", overflow="ellipsis", no_wrap=True))
        return Box(
            body,
            title=Text(f" step {step:,}/{steps:,}{skipped} "),
            title_align="left",
            subtitle=Text(f" {self._checkpoint()} "),
            subtitle_align="right",
            border_style="dim",
            width=width,
        )

    def _checkpoint(self) -> str:
        if self._saved is None:
            return "no checkpoint yet"
        name, when = self._saved
        age = seconds_since(when)
        return f"saved {name}" + ("" if age is None else f", {duration(age)} ago")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone; the run is not
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


class Above:
    """Stands for `sys.stdout` or `sys.stderr` while the panel is drawn: whole lines go above it."""

    def __init__(self, panel: Panel, stream: TextIO) -> None:
        self.stream = stream
        self._panel = panel
        self._partial = ""

    def write(self, text: str) -> int:
        if isinstance(self.stream, Tee):  # what goes above the panel does not pass through the stream
            self.stream.log.write(text)
        *whole, self._partial = (self._partial + text).split("\n")
        if whole:
            self._panel.above("\n".join(whole) + "\n")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Print what has no end of line yet."""
        if self._partial:
            self._panel.above(f"{self._partial}\n")
            self._partial = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as blocks of eight heights, at most `width` of them, each the mean of its share; `×` for NaN."""
    if not values or width < 1:
        return ""
    data = list(values)
    count = min(width, len(data))
    edges = [round(i * len(data) / count) for i in range(count + 1)]
    means = [sum(data[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    finite = [mean for mean in means if mean - mean == 0]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] if mean - mean == 0 else "×" for mean in means)
