"""The lines after a run: what to type next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titancli.cli.train import _say_next
from titancli.recipe import load_recipe

EXPORT = "export:    titan convert-checkpoint r/checkpoints/step-5 OUT"


def said(capsys: pytest.CaptureFixture[str], recipe: Any, *plugin_files: str) -> list[str]:
    outcome = {"why": "finished", "step": 5, "checkpoint": "checkpoints/step-5"}
    folder: Any = SimpleNamespace(path=Path.cwd() / "r", outcome=lambda: outcome)
    request: Any = SimpleNamespace(plugin_files=[Path(file) for file in plugin_files], nnodes=1, rdzv=None)
    _say_next(folder, recipe, None, {"CXX": "g++ -O1"}, request)
    return capsys.readouterr().err.splitlines()


def test_both_lines_have_the_plugin_files(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, load_recipe("llama3_debug").recipe, "/x/my lab.py")
    flags = " -p '/x/my lab.py'"
    assert lines[1] == f"continue:  titan train r --resume training.steps=10{flags} --env 'CXX=g++ -O1'"
    assert lines[2] == f"{EXPORT}{flags} --to hf"


def test_adapters_are_exported_as_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, load_recipe("llama3_debug", ["converters=[{type='lora'}]", "weights=/w"]).recipe)
    assert lines[2] == f"{EXPORT} --to peft    # the adapters; --to hf merges them"


def test_a_model_without_a_hugging_face_form_is_not_exported(capsys: pytest.CaptureFixture[str]) -> None:
    class Bare:
        __component__ = SimpleNamespace(hf=None)

    recipe = SimpleNamespace(model=Bare(), converters=[])
    assert [line[:9] for line in said(capsys, recipe)] == ["finished ", "continue:"]
