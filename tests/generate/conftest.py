from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Titan, titan
from tests.generate.models import make_checkpoint, make_tokenizer

__all__ = ["titan"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes as tokens."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / "step-3"
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of its own, exported; to be copied before it is changed."""
    from titancli.cli import main

    base = tmp_path_factory.mktemp("hf")
    tokenizer = make_tokenizer(base / "tokenizer")
    settings = ("model.vocab_size=259", "tokenizer.type=hf", f"tokenizer.path={tokenizer}")
    make_checkpoint(base / "step-1", *settings, seed=2)
    assert main(["convert-checkpoint", str(base / "step-1"), str(base / "hf"), "--to", "hf"]) == 0
    return base / "hf"


@pytest.fixture
def generated(titan: Titan) -> Callable[..., dict[str, Any]]:
    """`generated(*arguments)`: the document of `titan generate … --json`."""

    def run(*arguments: object) -> dict[str, Any]:
        done = titan("generate", *map(str, arguments), "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    return run
