"""The plugin's component, and the line of its code, that an error came through: for plugin authors."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from titancli.errors import TitanError, causes
from titancli.registry.component import BUILT, component_info
from titancli.registry.plugins import Plugin

LIBRARIES = ("titancli", "torch")
"""Packages whose code belongs to no plugin, even if a plugin's component names it as its target."""


@dataclass(frozen=True)
class Blame:
    """The component and the place to blame; as text, `the loss lab/z_loss, z_loss.py:14`."""

    component: str
    """`the loss lab/z_loss`; `the plugin lab` for code outside its components."""
    place: str
    """FILE:LINE, relative to the working directory if the file is below it."""

    def __str__(self) -> str:
        return f"{self.component}, {self.place}"


def blame(error: BaseException) -> Blame | None:
    """Return the last line of a plugin's code that an error, or one of its causes, came through.

    None if there is none, and for an error of titan's classes that a plugin raises on purpose: its message is
    complete.
    """
    from titancli.registry import made

    registry = made()
    guests = registry.guests if registry is not None else []
    owners = {package: plugin for plugin in guests if plugin.loaded for package in _packages(plugin)}
    for cause in causes(error):
        if (known := getattr(cause, "blamed", None)) is not None:  # of another process, by its frames
            return known
        frames = list(traceback.walk_tb(cause.__traceback__))
        own = [(frame, line) for frame, line in frames if _package(frame) in owners]
        if own and not (isinstance(cause, TitanError) and frames[-1] == own[-1]):
            frame, line = own[-1]
            plugin = owners[_package(frame)]
            through = [frame for frame, _ in reversed(own) if owners[_package(frame)] is plugin]
            return Blame(_component(plugin, through), f"{_shown(frame)}:{line}")
    return None


def _packages(plugin: Plugin) -> set[str]:
    modules = {cls.__module__ for cls in plugin.components.values()}
    modules |= {component_info(cls).target.partition(":")[0] for cls in plugin.components.values()}
    return {module.partition(".")[0] for module in modules} - {*LIBRARIES}


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _component(plugin: Plugin, frames: list[FrameType]) -> str:
    """Return the component that a plugin's frames belong to, the innermost first: by its target, by the class
    that it was built as, or else as the only one of its module."""
    targets = {key: component_info(cls).target for key, cls in plugin.components.items()}
    ways: list[Callable[[str, str], set[tuple[str, str]]]] = [
        lambda module, name: {key for key in targets if targets[key] == f"{module}:{name.partition('.')[0]}"},
        lambda module, name: BUILT.get((module, name.rpartition(".")[0]), set()) & set(targets),
        lambda module, name: {key for key in targets if targets[key].partition(":")[0] == module},
    ]
    for way in ways:
        for frame in frames:
            fitting = way(str(frame.f_globals.get("__name__")), frame.f_code.co_qualname)
            if len(fitting) == 1:
                kind, found = fitting.pop()
                return f"the {kind} {plugin.name}/{found}"
    return f"the plugin {plugin.name}"


def _shown(frame: FrameType) -> str:
    file = Path(frame.f_code.co_filename)
    return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
