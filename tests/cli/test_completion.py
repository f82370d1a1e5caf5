"""What a shell is told when Tab is pressed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def completed(folder: Path, line: str) -> list[str]:
    """The completions of a line's last word, as click's bash script asks for them."""
    words = line.split(" ")
    asked = {"_TITAN_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    command = [str(Path(sys.executable).with_name("titan"))]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return [word.partition(",")[2] for word in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("titan list-c", {"list-components"}),
        ("titan show opt", {"optimizer/adamw"}),
        ("titan list-components log", {"logger"}),
        ("titan validate llama3_8", {"llama3_8b"}),
        ("titan train llama3_debug training.st", {"training.steps="}),
        ("titan train llama3_debug optimizer.beta", {"optimizer.beta1=", "optimizer.beta2="}),
        ("titan train llama3_debug model.fl", {"model.flavor="}),
        ("titan train llama3_debug compile.enable=", {"compile.enable=true", "compile.enable=false"}),
        ("titan train llama3_debug loss=cross_entropy_", {"loss=cross_entropy_full"}),
        ("titan train llama3_debug compile.enable = t", {"true"}),
        ("titan plugins tit", {"titan"}),
        ("titan train -p ./x", {"./x"}),
        ("titan -p ./x", {"./x"}),
        ("titan -q train -v llama3_debug training.st", {"training.steps="}),
        ("titan -p no:titan validate llama3_8", set()),
        ("titan new-recipe mine.toml --from llama3_d", {"llama3_debug"}),
    ],
)
def test_words_are_completed(tmp_path: Path, line: str, expected: set[str]) -> None:
    assert expected <= set(completed(tmp_path, line))


def test_a_recipe_may_be_a_file(tmp_path: Path) -> None:
    assert "./my" in completed(tmp_path, "titan train ./my")


def test_keys_are_those_of_the_components_that_were_chosen(tmp_path: Path) -> None:
    pytest.importorskip("titan_muon")
    line = "titan config llama3_debug optimizer=muon optimizer.mo"
    assert completed(tmp_path, line) == ["optimizer.momentum="]


def test_a_recipe_that_is_wrong_still_has_the_keys_of_titan(tmp_path: Path) -> None:
    assert "training.steps=" in completed(tmp_path, "titan train nowhere training.ste")


def test_what_a_plugin_file_adds_is_completed_too(tmp_path: Path) -> None:
    (tmp_path / "cli_lab.py").write_text(
        "from titancli import component, hookimpl\n"
        "@component('loss', 'labelled', target='cli_lab:build')\n"
        "class Labelled:\n    'A loss.'\n"
        "@hookimpl\ndef titan_components():\n    return [Labelled]\n"
    )
    line = "titan train -p ./cli_lab.py llama3_debug loss=lab"
    assert completed(tmp_path, line) == ["loss=labelled"]
    assert "loss=labelled" not in completed(tmp_path, line.replace("-p ./cli_lab.py ", ""))
