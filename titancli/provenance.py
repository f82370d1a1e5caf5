"""Where a run comes from: versions, host, git state, plugin files. Torch-free."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import socket
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("titancli", "torch", "transformers", "datasets", "safetensors", "numpy", "pydantic")


def provenance(plugin_files: list[Path]) -> dict[str, Any]:
    """What `run.json` records of the command and the machine: plain JSON."""
    return {
        "argv": sys.argv,
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "user": _user(),
        "process": os.getpid(),
        "platform": platform.platform(),
        "versions": versions(),
        "git": git_state(Path.cwd()),
        "plugin_files": [{"path": str(file), "sha256": file_hash(file)} for file in plugin_files],
    }


def versions() -> dict[str, str]:
    """Versions of Python, of what matters for results, and of every distribution that brings a plugin."""
    return {"python": platform.python_version(), **package_versions(PACKAGES)}


def package_versions(names: tuple[str, ...] = ("titancli", "torch")) -> dict[str, str]:
    """Versions of these packages, and of every distribution that brings a plugin."""
    found = {}
    plugins = {point.dist.name for point in entry_points() if point.dist is not None}
    for name in (*names, *sorted(plugins - set(names))):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an optional package that is not there has no version
    return found


def entry_points() -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of the group `titancli`. With a hundred packages a search takes 10 ms, so that
    it is made again only where a folder of `sys.path` has changed."""
    return _entry_points(tuple((folder, _changed_at(folder)) for folder in sys.path))


@lru_cache(maxsize=1)
def _entry_points(folders: tuple[tuple[str, int | None], ...]) -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group="titancli"))


def _changed_at(folder: str) -> int | None:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and whether there are changes; None outside a repository or without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return None
