"""The live panel: what it shows, and that nothing else on the terminal gets lost."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections import deque
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from titancli.observe.console import Console
from titancli.observe.panel import Panel, sparkline, watcher_for
from titancli.runs import timestamp

COLUMNS, LINES = 80, 24


class Terminal:
    """A small terminal: what the control sequences that the panel uses leave on the screen."""

    encoding = "utf-8"

    def __init__(self, *, terminal: bool = True) -> None:
        self.rows: list[str] = [""]
        self.row = self.column = 0
        self.raw = ""
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def flush(self) -> None:
        """Nothing is kept back."""

    def write(self, text: str) -> int:
        self.raw += text
        for control, argument, name, plain in re.findall(r"(\x1b\[([\d;]*)([A-Za-z]))|([^\x1b])", text):
            if not control:
                self._put(plain)
            elif name == "A":
                self.row -= int(argument or 1)
                assert self.row >= 0
            elif name == "J":
                self.rows[self.row :] = [self.rows[self.row][: self.column]]
            else:
                assert name == "m", control
        return len(text)

    def _put(self, character: str) -> None:
        if character == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.rows):
                self.rows.append("")
        elif character == "\r":
            self.column = 0
        else:
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1

    @property
    def screen(self) -> list[str]:
        return [row.rstrip() for row in self.rows]


@pytest.fixture(autouse=True)
def a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI", "COLORTERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(LINES))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is drawn."""
    monkeypatch.setattr("titancli.observe.panel.SECONDS", 0.0)


START = {
    "event": "run_start",
    "step": 0,
    "device": "CPU",
    "world": 2,
    "mesh": {"dp_shard": 2},
    "checkpoint": None,
}


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "steps": 100, "metrics": metrics}


def full(number: int) -> dict[str, Any]:
    return step(
        number,
        loss=5.0 - number / 50,
        grad_norm=0.8721,
        lr=3e-4,
        tokens_per_second=21345.0,
        mfu=0.412,
        memory_gib=1.23,
        eta_seconds=42.0,
    )


def test_the_panel_shows_everything(often: None) -> None:
    terminal = Terminal()
    panel = Panel(terminal)
    panel(START)
    for number in range(1, 51):
        panel(full(number))
    panel({"event": "checkpoint", "step": 50, "path": "/runs/x/checkpoints/step-50", "time": timestamp()})
    first, blank, top, progress, loss, rate, bottom = terminal.screen
    assert first == "training on CPU, 2 ranks (dp_shard 2)"
    assert blank == ""
    assert top.startswith("╭─  step 50/100  ─") and top.endswith("╮")
    assert {len(line) for line in (top, progress, loss, rate, bottom)} == {COLUMNS - 1}
    done, left = re.fullmatch(r"│ (━+)(╌+)  50%  ETA 0:42 │", progress).groups()
    assert abs(len(done) - len(left)) <= 1
    assert re.fullmatch(r"│ loss 4\.0000  █[█▇▆▅▄▃▂▁]+▁ +grad norm 0\.872 +lr 3\.00e-04 │", loss)
    assert re.fullmatch(r"│ 21\.3k tokens/s +MFU 41\.2% +1\.2 GiB │", rate)
    assert bottom.endswith("─  saved step-50, 0:00 ago  ─╯")


def test_bar_without_colours(often: None) -> None:
    """A full bar and an empty one differ where no colour shows it."""
    bars = []
    for number in (0, 100):
        terminal = Terminal()
        Panel(terminal)(full(number))
        bars.append(re.search("[━╌]+", "\n".join(terminal.screen)).group())
    assert set(bars[0]) == {"╌"} and set(bars[1]) == {"━"}


def test_the_last_evaluation_stands_in_the_panel_and_each_above_it(often: None) -> None:
    terminal = Terminal()
    panel = Panel(terminal)
    panel(START)
    panel(full(1))
    for number in (10, 20):
        metrics = {"validation/books/loss": 2.0, "validation/books/perplexity": 7.389}
        metrics["validation/code/loss"] = number / 10
        panel({"event": "validation", "step": number, "seconds": 1.0, "metrics": metrics})
    panel(full(21))
    shown = terminal.screen
    line = "books loss 2.0000, perplexity 7.389; code loss"
    assert [f"validation at step 10: {line} 1.0000", f"validation at step 20: {line} 2.0000"] == [
        row for row in shown if row.startswith("validation")
    ]
    inside = [row.strip("│ ") for row in shown if "│ validation" in row]
    assert inside == [
        "validation books loss 2.0000, perplexity 7.389 (step 20)",
        "validation code loss 2.0000 (step 20)",
    ]


def test_the_age_of_a_checkpoint_is_that_of_its_event(often: None) -> None:
    terminal = Terminal()
    panel = Panel(terminal)
    hour_ago = (datetime.now(UTC) - timedelta(hours=1, seconds=2)).isoformat()
    for time, words in ((hour_ago, "saved step-1, 1:00:02 ago"), ("no time", "saved step-1  ─╯")):
        panel({"event": "checkpoint", "step": 1, "path": "/runs/x/checkpoints/step-1", "time": time})
        panel(step(1, loss=1.0))
        assert words in terminal.screen[-1]


def test_a_replay_draws_once_and_drops_what_a_restart_made_void() -> None:
    terminal = Terminal()
    panel = Panel(terminal)
    again = {**START, "step": 2}
    panel.replay([START, full(1), full(2), step(3, loss=9.0), {"event": "run_end"}, again, step(3, loss=2.0)])
    assert terminal.raw.count("╭") == 1
    assert terminal.screen[:2] == ["training on CPU, 2 ranks (dp_shard 2)"] * 2
    assert "loss 2.0000  ██▁ " in terminal.screen[5]
    panel.close()


def test_steps_that_were_skipped_are_counted_in_the_title(often: None) -> None:
    for count, title in ((0.0, "╭─  step 3/100  ─"), (2.0, "╭─  step 3/100, 2 skipped  ─")):
        terminal = Terminal()
        Panel(terminal)(step(3, loss=2.0, skipped_steps=count))
        assert any(line.startswith(title) for line in terminal.screen)


def test_what_is_unknown_is_a_dash(often: None) -> None:
    terminal = Terminal()
    Panel(terminal)(step(1, loss="NaN"))
    text = "\n".join(terminal.screen)
    for part in ("loss nan  ×", "grad norm —", "— tokens/s", "— GiB", "ETA —", "no checkpoint yet"):
        assert part in text


def test_the_cursor_rests_above_the_panel_so_that_foreign_output_is_not_erased(often: None) -> None:
    terminal = Terminal()
    panel = Panel(terminal)
    panel(full(1))
    terminal.write("a library's own words\n")  # not through us
    panel(full(2))
    assert terminal.screen[0] == "a library's own words"
    assert terminal.screen[2].startswith("╭─  step 2/100")
    assert sum("╭" in line for line in terminal.screen) == 1


def test_logs_and_what_is_printed_stand_above_the_panel(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    panel = Panel(terminal)
    panel(full(1))
    panel({"event": "log", "level": "warning", "message": "odd"})
    print("one", end=" ")
    assert "one" not in "".join(terminal.screen)
    print("line")
    print("and a half", end="")
    panel({"event": "run_end", "why": "finished"})
    assert sys.stdout is terminal
    assert terminal.screen[:3] == ["warning: odd", "one line", "and a half"]
    assert terminal.screen[3].startswith("╭") and terminal.screen[-2].startswith("╰")
    assert (terminal.row, terminal.column) == (len(terminal.rows) - 1, 0)


def test_the_last_step_stands_when_the_run_ends_even_if_it_was_not_drawn() -> None:
    terminal = Terminal()
    panel = Panel(terminal)
    for number in (1, 2, 3):
        panel(full(number))
    assert "step 1/100" in "".join(terminal.screen)  # the others came too soon after it
    panel.close()
    assert "step 3/100" in "".join(terminal.screen)
    panel.close()
    assert sum("╭" in line for line in terminal.screen) == 1


def test_a_run_that_ends_before_its_first_step_leaves_no_panel() -> None:
    terminal = Terminal()
    panel = Panel(terminal)
    panel(START)
    panel.close()
    assert terminal.screen == ["training on CPU, 2 ranks (dp_shard 2)", ""]


def test_drawing_again_follows_the_size_of_the_terminal(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    panel = Panel(terminal)
    panel(full(1))
    monkeypatch.setenv("COLUMNS", "70")
    panel(full(2))
    assert max(map(len, terminal.screen)) == 69
    monkeypatch.setenv("COLUMNS", "40")
    panel(full(3))
    assert terminal.screen[1:] == ["step 3/100  loss 4.9400  ETA 0:42"]
    monkeypatch.setenv("COLUMNS", "300")
    panel(full(4))
    assert max(map(len, terminal.screen)) == 100


def test_a_terminal_that_is_gone_does_not_end_the_run(often: None) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    panel = Panel(Gone())
    panel(full(1))
    panel(full(2))
    panel.close()


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"CI": "true"}], ids=lambda one: next(iter(one))
)
def test_plain_lines_where_a_panel_has_no_place(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    watcher = watcher_for(terminal)
    assert isinstance(watcher, Console)
    watcher(step(1, loss=3.0))
    watcher(step(2, loss=2.0))
    assert "\x1b" not in terminal.raw and terminal.raw.count("\n") == 2


def test_a_terminal_gets_the_panel_and_a_pipe_gets_lines() -> None:
    assert isinstance(watcher_for(Terminal()), Panel)
    assert isinstance(watcher_for(Terminal(terminal=False)), Console)


def test_a_terminal_that_cannot_show_boxes_gets_no_panel() -> None:
    terminal = Terminal()
    terminal.encoding = "ascii"
    assert isinstance(watcher_for(terminal), Console)


def test_a_sparkline_has_the_shape_of_its_values() -> None:
    assert sparkline(deque(range(8)), 20) == "▁▂▃▄▅▆▇█"
    assert sparkline(deque(range(16)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(deque([2.0, 2.0]), 5) == "▁▁"
    assert sparkline(deque([1.0, float("nan"), 3.0, float("inf")]), 9) == "▁×█×"
    assert sparkline(deque(), 9) == "" == sparkline(deque([1.0]), 0)


def on_a_terminal(*command: str) -> str:
    """What a process writes to a terminal of 80 columns that is its stderr."""
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    if command[1] == "-c":  # what is forked (tests/warm.py) writes UTF-8 anyway
        environment["PYTHONIOENCODING"] = "utf-8"
    process = subprocess.Popen(command, stderr=writer, env=environment)
    os.close(writer)
    text = b""
    while True:
        try:
            piece = os.read(reader, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not piece:
            break
        text += piece
    os.close(reader)
    assert process.wait(60) == 0
    return text.decode().replace("\r\n", "\n")


def test_on_a_real_terminal_warnings_and_tracebacks_stay_whole() -> None:
    """And rich is not imported before there is something to draw."""
    seen = on_a_terminal(
        sys.executable,
        "-c",
        "import sys, warnings\n"
        "from titancli.observe.panel import watcher_for\n"
        "watcher = watcher_for(sys.stderr)\n"
        "assert type(watcher).__name__ == 'Panel' and 'rich' not in sys.modules\n"
        f"watcher({full(1)!r})\n"
        "warnings.warn('look out')\n"
        f"watcher({full(2)!r})\n"
        "watcher.close()\n"
        "print('Traceback', file=sys.stderr)\n"
        "assert 'torch' not in sys.modules\n",
    )
    terminal = Terminal()
    terminal.write(seen)
    assert "UserWarning: look out" in terminal.screen[0]
    assert "step 2/100" in "".join(terminal.screen)
    assert sum("╭" in line for line in terminal.screen) == 1
    assert terminal.screen[-2:] == ["Traceback", ""]


@pytest.mark.e2e
def test_a_run_at_a_terminal_draws_the_panel_and_ends_below_it(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a line of a text\n" * 99)  # quicker to read than Python's own source
    arguments = [
        *("train", "llama3_debug", f'dataset={{type="text_files", paths=["{tmp_path}/text.txt"]}}'),
        *("--run-dir", str(tmp_path / "run"), "training.steps=3"),
        *("training.seq_len=16", "training.local_batch_size=1", "metrics.log_freq=1"),
        *("lr_scheduler.warmup_steps=0", "checkpoint.interval=2", "model.dim=32", "model.n_layers=2"),
    ]
    terminal = Terminal()
    terminal.write(on_a_terminal(str(Path(sys.executable).with_name("titan")), *arguments))
    screen = terminal.screen
    assert [line.split(":")[0] for line in screen[1:4]] == ["model", "data", "saves"]
    assert screen[4].startswith("training on CPU, 1 rank")
    assert "step 3/3" in screen[5] and "saved step-3" in screen[9]
    assert screen[10].startswith("finished at step 3")
