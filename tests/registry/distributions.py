"""Writes small distributions into a folder of sys.path, as pip would leave them there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from textwrap import dedent

import pytest


class Site:
    """A folder like site-packages; its modules are forgotten when the test ends."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)

    def add(self, entry_point: str, code: str, *, distribution: str = "", version: str = "1.0") -> str:
        """Install a module with this code behind an entry point of titan's group; returns its name."""
        distribution = distribution or entry_point
        module = f"{distribution}_{entry_point}".replace("-", "_")
        (self.folder / f"{module}.py").write_text(dedent(code))
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        with (info / "entry_points.txt").open("a") as file:
            if file.tell() == 0:
                file.write("[titancli]\n")
            file.write(f"{entry_point} = {module}\n")
        importlib.invalidate_caches()
        self._monkeypatch.delitem(sys.modules, module, raising=False)
        return module


def loss(name: str, *, class_name: str = "Config", extra: str = "") -> str:
    """The code of a plugin with one loss."""
    return dedent(f'''
        from titancli import component, hookimpl

        @component("loss", "{name}", target="nowhere:build")
        class {class_name}:
            """The {name} loss."""

        @hookimpl
        def titan_components():
            return [{class_name}]
        ''') + dedent(extra)
