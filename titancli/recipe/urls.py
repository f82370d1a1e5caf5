"""URLs where a recipe says a path: `weights = "s3://bucket/prefix/step-500"`."""

from __future__ import annotations

import re
from pathlib import Path

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+")


def url_of(path: Path) -> str | None:
    """The URL that a path was written as, or None; a Path has lost some of its slashes."""
    match = _URL.match(str(path))
    if match is None:
        return None
    root = "/" if match[1] in ("file", "local") else ""
    return f"{match[1]}://{root}{str(path)[match.end() :]}"
