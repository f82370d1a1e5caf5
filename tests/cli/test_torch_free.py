"""Commands that need no model answer without importing one, and quickly."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import absent

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "datasets", "numpy", "rich"}
PROBE = """
import json, resource, sys
from titancli.cli import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
seen = sorted({name.partition(".")[0] for name in sys.modules})
from tests.yardstick import unit
units = (used.ru_utime + used.ru_stime) / unit()
print(json.dumps({"code": code, "seen": seen, "units": units}), file=sys.stderr)
"""


def probe(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return json.loads(done.stderr.splitlines()[-1])


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """A command's `probe`, made once for all tests."""

    @functools.cache
    def of(*arguments: str) -> dict[str, Any]:
        return probe(tmp_path_factory.mktemp("probe"), *arguments)

    return of


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["recipe", "--help"],
        ["train", "--help"],
        ["convert-checkpoint", "--help"],
        ["validate", "llama3_debug"],
        ["validate", "llama3_8b", "--recipe-only"],
        ["recipe", "show", "llama3_debug", "--origin"],
        ["recipe", "diff", "llama3_debug", "llama3_8b"],
        ["recipe", "new", "new.toml", "--from", "llama3_debug"],
        ["recipe", "schema"],
        ["recipe", "list"],
        ["list-components"],
        ["show", "model/llama3"],
        ["plugin", "list"],
        ["plugin", "new", "titan-new", "--kind", "loss"],
        ["plugin", "new", "titan-new", "--kind", "loop"],
    ],
    ids=" ".join,
)
def test_a_command_imports_nothing_heavy(probed: Callable[..., dict[str, Any]], arguments: list[str]) -> None:
    absent.need_command(" ".join(arguments))
    found = probed(*arguments)
    assert not HEAVY & set(found["seen"])
    assert found["code"] == 0


@pytest.mark.parametrize(
    "dataset",
    [
        'type = "text_files", paths = ["a.txt"]',
        'type = "jsonl", paths = ["a.jsonl"]',
        'type = "parquet", paths = ["a.parquet"]',
        'type = "token_shards", paths = ["shards"]',
        'type = "hf", path = "./a.jsonl"',
        'type = "chat", path = "./a.jsonl"',
    ],
)
def test_a_look_at_data_needs_no_torch(tmp_path: Path, dataset: str) -> None:
    (tmp_path / "a.txt").write_text("a text\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a text"}\n')
    found = probe(tmp_path, "validate", "llama3_debug", f"dataset={{{dataset}}}")
    assert not {"torch", "transformers", "datasets"} & set(found["seen"])
    assert found["code"] == (0 if "a.txt" in dataset or "a.jsonl" in dataset else 5)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["list-components"], ["recipe", "list"], ["show", "llama3"]]
)
def test_only_a_bound_recipe_needs_pydantic(
    probed: Callable[..., dict[str, Any]], arguments: list[str]
) -> None:
    assert "pydantic" not in probed(*arguments)["seen"]


@pytest.mark.parametrize(
    ("arguments", "units"),
    [(["--help"], 30), (["list-components"], 75), (["validate", "llama3_debug"], 120)],
    ids=lambda value: str(value[0] if isinstance(value, list) else value),
)
def test_a_command_answers_at_once(
    probed: Callable[..., dict[str, Any]], tmp_path: Path, arguments: list[str], units: int
) -> None:
    # Three times what it takes (`tests.yardstick`): this catches a heavy import, not a slow neighbour.
    found = probed(*arguments)
    if found["units"] >= units:
        found = probe(tmp_path, *arguments)
    assert found["units"] < units


def test_help_waits_for_nothing_that_runs_need(probed: Callable[..., dict[str, Any]]) -> None:
    assert not {"logging", "ctypes"} & set(probed("--help")["seen"])
