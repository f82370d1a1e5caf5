"""Draw the pictures of the front page: a run's panel (SVG), the report of all runs (PNG, needs chromium).

titan train llama3_debug training.seq_len=128 training.local_batch_size=4 metrics.log_freq=2 --run-dir RUN
python docs/pictures/make.py RUN [OTHER]...
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from titancli.cli import main
from titancli.observe.events import read_events
from titancli.observe.panel import Panel

HERE = Path(__file__).parent
COLUMNS = 92
BROWSER = "chromium"
_FETCHED = re.compile(r"@font-face \{.*?\}\n*", re.DOTALL)
_CURSOR = re.compile(r"\x1b\[\d*[A-K]|\r")


def panel(run: Path, share: float = 0.6) -> str:
    """Return the panel as it stood after this share of a run's steps, as SVG without fetched fonts."""
    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "24"}
    # A checkpoint is shown with its age now, which is none that anybody has seen.
    events = [event for event in read_events(run / "events.jsonl") if event["event"] in ("run_start", "step")]
    stream = io.StringIO()
    Panel(stream).replay(events[: round(share * len(events)) + 1])
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("$ titan train llama3_debug\n" + _CURSOR.sub("", stream.getvalue())))
    return _FETCHED.sub("", console.export_svg(title="titan", unique_id="panel"))


def report(runs: list[str], to: Path) -> None:
    """Write the beginning of the report of runs as PNG, in few colors and therefore small."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        if main(["report", *runs, "-o", str(page)]) != 0:
            sys.exit("titan report failed")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1240,1400",
        ]
        subprocess.run([BROWSER, *options, f"--screenshot={to}", page.as_uri()], check=True)
    Image.open(to).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(to, optimize=True)


if __name__ == "__main__":
    (HERE / "panel.svg").write_text(panel(Path(sys.argv[1])), encoding="utf-8")
    report(sys.argv[1:], HERE / "report.png")
