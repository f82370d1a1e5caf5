"""The page of `titan report` in a real browser: narrow and wide, light and dark."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Titan, titan  # noqa: F401 - a fixture
from tests.cli.run_folders import LOCK, at, attempt, began, ended, event, make, step

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (360, 390, 800, 1280)
FRAME = """<!doctype html><body>{frames}<pre id="found"></pre><script>
// What a person would see at each width.
onload = () => {{
  const found = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument, width = page.documentElement.clientWidth;
    const inside = element => element.closest(".scroll, pre, .plot .tip");
    const right = element => element.getBoundingClientRect().right;
    const over = element => right(element) > right(element.closest(".card, main")) + 1;
    const wide = [...page.querySelectorAll("body *")].filter(one => !inside(one) && right(one) > width + 1);
    const cut = [...page.querySelectorAll(".card svg text, .facts b, h1, h3")].filter(one =>
      !inside(one) && one.getBoundingClientRect().width && over(one));
    const plot = [...page.querySelectorAll(".plot")].find(one => one.getBoundingClientRect().width);
    const box = plot.getBoundingClientRect(), tip = plot.querySelector(".tip");
    const move = x => plot.dispatchEvent(new frame.contentWindow.PointerEvent("pointermove",
      {{clientX: box.left + x * box.width, clientY: box.top + 9}}));
    move(0.999);
    const end = tip.innerText, place = tip.getBoundingClientRect();
    const seen = place.right <= box.right + 1 && place.left >= box.left - 1;
    plot.dispatchEvent(new frame.contentWindow.PointerEvent("pointerleave"));
    return {{
      width, scroll: page.documentElement.scrollWidth,
      wide: wide.map(one => one.outerHTML.slice(0, 120)), cut: cut.map(one => one.outerHTML.slice(0, 120)),
      fetched: frame.contentWindow.performance.getEntriesByType("resource").map(one => one.name),
      plots: [...page.querySelectorAll("svg")].filter(one => one.getBoundingClientRect().width).length,
      scrolled: [...page.querySelectorAll(".scroll")].filter(one => one.scrollWidth > one.clientWidth + 1)
        .map(one => one.innerText.slice(0, 80)),
      end, seen, hidden: tip.style.display,
      colors: ["color", "backgroundColor"].map(name => frame.contentWindow.getComputedStyle(page.body)[name]),
      line: frame.contentWindow.getComputedStyle(page.querySelector("svg path[style*=p10]")).stroke,
    }};
  }});
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>"""


@pytest.fixture
def page(tmp_path: Path, titan: Titan) -> Path:  # noqa: F811
    """Make a report of two runs with long names, a spike, NaN, a resume and a long warning."""
    rows = [
        step(n, n, "NaN" if n == 50 else 2 + 8 * math.exp(-n / 30) + 0.3 * math.sin(n), grad_norm=1e-5 * n)
        for n in range(1, 100)
    ]
    warning = event("log", 99, level="warning", message="a/very/long/path" * 20)
    end = attempt(ended("finished", 99), ended=at(100))
    a = make(tmp_path / ("run-" + "x" * 60), [began(0), *rows, warning], [end])
    again = [began(0), *rows[:60], began(70, step=40, attempt=2), *rows[40:80]]
    attempts = [attempt(), attempt(started=at(65))]
    b = make(tmp_path / "b", again, attempts, lock=LOCK.replace("0.001", "0.5"))
    assert titan("report", a, b, "-o", "page.html").code == 0
    return Path("page.html").absolute()


def seen(page: Path, *, dark: bool) -> list[dict[str, Any]]:
    """Return how a browser lays out a page, at each of `WIDTHS`."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    source = html.escape(page.read_text())
    frames = "".join(
        f'<iframe srcdoc="{source}" style="width:{w}px;height:900px;border:0"></iframe>' for w in WIDTHS
    )
    page.with_name("frame.html").write_text(FRAME.format(frames=frames))
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--dump-dom",
        "--virtual-time-budget=2000",
    ]
    options += [f"--user-data-dir={page.with_name('browser')}", "--window-size=1400,1000"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [browser, *options, page.with_name("frame.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL) or [""]
    assert found, done.stderr
    return json.loads(html.unescape(found))


def brightness(color: str) -> float:
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 765


@pytest.mark.needs("|".join(BROWSERS), install="apt install chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_overflows_and_nothing_is_fetched(page: Path, dark: bool) -> None:
    found = seen(page, dark=dark)
    assert [one["width"] for one in found] == list(WIDTHS)
    for one in found:
        assert one["scroll"] <= one["width"], one
        assert (one["wide"], one["cut"], one["fetched"]) == ([], [], []), one["width"]
        assert one["width"] < 1280 or one["scrolled"] == []  # on a screen no table is cut
        assert one["plots"] == 5  # loss, gradient norm, lr, tokens per second, seconds per step
        # The pointer at the end of the loss: the step, and the value of each run; the text is inside.
        assert one["end"].split()[:2] == ["step", "99"] and len(one["end"].splitlines()) == 3, one["end"]
        assert one["seen"] and one["hidden"] == "none"
        text, background = map(brightness, one["colors"])
        assert (text - background > 0.6) if dark else (background - text > 0.6)
        assert one["line"].startswith("rgb") and one["line"] != "rgb(0, 0, 0)"
