"""`titan recipe diff RECIPE OTHER`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Titan


@pytest.fixture
def run(titan: Titan, tmp_path: Path) -> Path:
    """A run's folder, of an older torch and with a plugin that is not there now."""
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    lock = titan("recipe", "show", "llama3_debug", "training.steps=70").out
    (folder / "recipe.lock.toml").write_text(f'{lock}\n[gone]\ntype = "lab/gone"\n')
    attempt = {
        "versions": {"torch": "0.1", "titan-lab": "1.0"},
        "plugin_files": [{"path": "/x/mine.py", "sha256": "ab" * 32}],
    }
    (folder / "run.json").write_text(json.dumps({"format": 1, "attempts": [{"versions": {}}, attempt]}))
    return folder


def test_keys_that_differ_are_told_with_both_values(titan: Titan) -> None:
    done = titan("recipe", "diff", "llama3_debug", "training.steps=70", "llama3_debug")
    assert done.out.splitlines() == ["training.steps: 70 -> 100"]
    same = titan("recipe", "diff", "llama3_debug", "titan:llama3_debug")
    assert (same.code, same.out, same.err) == (0, "", "nothing differs\n")


def test_a_run_is_compared_as_it_was_recorded(titan: Titan, run: Path) -> None:
    lines = titan("recipe", "diff", "llama3_debug", run).out.splitlines()
    assert "training.steps: 100 -> 70" in lines
    assert 'gone.type: (not set) -> "lab/gone"' in lines  # though no such plugin is installed
    assert any(line.startswith("torch (installed): ") and line.endswith(" -> 0.1") for line in lines)
    assert "titan-lab (installed): none -> 1.0" in lines
    assert "mine.py (installed): none -> sha256 abababababab" in lines


def test_as_json_it_is_one_document(titan: Titan, run: Path) -> None:
    document = json.loads(titan("recipe", "diff", "llama3_debug", run, "--json").out)
    assert document["schema"] == "titan.config-diff"
    assert {"key": "training.steps", "here": 100, "other": 70} in document["recipe"]
    assert {"key": "titan-lab", "here": None, "other": "1.0"} in document["software"]


def test_two_answers_at_once_are_refused(titan: Titan) -> None:
    assert titan("recipe", "show", "llama3_debug", "--diff", "llama3_1b", "--origin").code == 2
    assert titan("recipe", "diff", "llama3_debug", "no_such_recipe").code == 3
    assert titan("recipe", "diff", "llama3_debug").code == 2


def test_an_array_that_one_lacks_is_told_by_its_elements_alone(titan: Titan) -> None:
    words = ("llama3_debug", "converters=[{type='lora'}]", "weights=/w", "llama3_debug")
    lines = titan("recipe", "diff", *words).out.splitlines()
    assert 'converters.0.type: "titan/lora" -> (not set)' in lines
    assert not [line for line in lines if line.startswith("converters:")]
