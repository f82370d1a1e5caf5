"""The plugins and components of this process: one registry, created on first use."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

_files: tuple[Path, ...] = ()
_blocked: tuple[str, ...] = ()
_checks = True
_current: Registry | None = None


def configure(*, files: Iterable[Path] = (), blocked: Iterable[str] = (), checks: bool = True) -> None:
    """Set the command line's options about plugins; the command and the worker call this first.

    `files` are plugin files to add (`-p ./file.py`), `blocked` the names of plugins to leave out (`-p
    no:NAME`). A worker passes `checks=False`: the command has already run the plugins' checks, and without
    them only the plugins that a lock file names are loaded. Plugins loaded before are forgotten.
    """
    global _files, _blocked, _checks, _current
    _files, _blocked, _checks, _current = tuple(files), tuple(blocked), checks, None


def current() -> Registry:
    """Return the registry of this process.

    Raises:
        UsageError: a plugin file is missing or has an unusable name, or a blocked name is not installed.
        EnvironmentProblem: titan itself is not installed.
    """
    global _current
    if _current is None:
        from titancli.registry.discover import load_plugins

        _current = load_plugins(files=_files, blocked=_blocked, checks=_checks)
    return _current


def made() -> Registry | None:
    """Return the registry of this process if it exists already."""
    return _current


def plugin_files() -> list[Path]:
    """Return the absolute paths of files added by `-p ./file.py`; a launcher passes them to its workers."""
    return [Path(file).absolute() for file in _files]
