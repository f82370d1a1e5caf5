"""Paths of datasets that are local or on the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any


def absolute(path: str) -> str:
    """Return a local path as absolute, so that a lock file means the same from every folder; Hub names are
    unchanged."""
    local = path == "~" or path in (".", "..") or path.startswith(("/", "./", "../", "~/"))
    return os.path.abspath(os.path.expanduser(path)) if local else path


def absolute_lines(path: str) -> str:
    """Return the same, with paths that end in `.jsonl` always local."""
    return os.path.abspath(os.path.expanduser(path)) if path.endswith(".jsonl") else absolute(path)


def is_saved(folder: str) -> bool:
    """Return whether a folder was written by `save_to_disk` of the library `datasets`."""
    return any(os.path.exists(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


def hub_keys(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys that apply only to the Hub but are set for a local `path`, each with an error
    message."""
    if os.path.isabs(config.path) or config.path.startswith("titan:"):
        for key in ("name", "revision"):
            if getattr(config, key) is not None:
                yield key, f"a {key} only applies to datasets on the Hub, not to {config.path}: remove it"
