"""The blocks and commands of a Markdown page, with what the comments before a block say of it.

<!-- not run: REASON -->       the block is left alone
<!-- file: NAME -->            the block is the content of this file, for the blocks after it
<!-- fails: CODE -->           the commands end with this exit code
<!-- one line at a time -->    each line is a recipe of its own
<!-- small model: NAME -->     there is a folder of this name with a model, small in place of a released one
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKS = ("not run", "file", "fails", "one line at a time", "small model")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- ([a-z ]+?)(?:: (.*?))? -->\n\Z")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    mark: str | None = None
    """One of MARKS."""
    value: str = ""


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        mark = _MARK.search(text, 0, fence.start())
        known = mark if mark is not None and mark[1] in MARKS else None
        line = text.count("\n", 0, fence.start()) + 1
        found.append(
            Block(fence[1], fence[2], line, known[1] if known else None, (known[2] or "") if known else "")
        )
    return found


def commands(page: Path) -> list[str]:
    """Every `titan …` that the page's text, tables and blocks name."""
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`(titan [^`\n]+)`", _FENCE.sub("", text))
    lines = [line.removeprefix("$ ") for block in blocks(page) for line in block.text.splitlines()]
    return [*inline, *(line for line in lines if line.startswith("titan "))]
