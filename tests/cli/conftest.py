from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from titancli import registry
from titancli.cli import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


Titan = Callable[..., Done]


@pytest.fixture
def titan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Titan]:
    """`titan(*arguments)`: the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TITAN_PLUGINS", raising=False)
    monkeypatch.setattr(logging, "raiseExceptions", False)  # handlers of libraries keep another test's stderr

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    before = set(sys.modules)
    yield run
    registry.configure()
    for name in set(sys.modules) - before:
        if name.startswith("cli_"):  # the plugin files of a test
            del sys.modules[name]
