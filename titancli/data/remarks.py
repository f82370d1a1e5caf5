"""Remarks on a row of data: what whoever reads it should know, though the row can be trained on.

Code that encodes a row makes them; who reads rows collects them, and names the row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


def remark(kind: str, text: str) -> None:
    """Add a remark on the row that this thread encodes; the first of each kind counts.

    Args:
        kind: what the remark is about, in one word; each kind is reported once.
        text: what is unusual, and what to do.
    """
    found: dict[str, str] | None = getattr(_thread, "found", None)
    if found is not None:
        found.setdefault(kind, text)


@contextmanager
def remarks() -> Iterator[dict[str, str]]:
    """Collect this thread's remarks in the dict that is yielded: texts by kind."""
    before, found = getattr(_thread, "found", None), dict[str, str]()
    _thread.found = found
    try:
        yield found
    finally:
        _thread.found = before
