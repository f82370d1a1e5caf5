"""Text for a terminal that comes from files which anybody may have written. Torch-free."""

from __future__ import annotations

import re
from typing import TypeVar

T = TypeVar("T")

_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""What sets a colour, moves the cursor or sets a title (ECMA-48: control sequences, and those of xterm)."""


def printable(text: str, keep: str = "") -> str:
    """Return a text without what a terminal would obey: whole sequences go, and other characters that cannot
    be printed become `?`, but those to `keep`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "?" for char in _SEQUENCE.sub("", text))


def clean(value: T) -> T:
    """Return the same of plain JSON, and of a text of several lines."""
    if isinstance(value, str):
        return printable(value, "\n\t")  # type: ignore[return-value]
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}  # type: ignore[return-value]
    return [clean(item) for item in value] if isinstance(value, list) else value  # type: ignore[return-value]
