"""The recipes that titan ships, with its own components; and what loading one costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from titancli.recipe import bundled_folder, load_recipe, lock_text

ROOT = Path(__file__).parents[2]
RECIPES = sorted(bundled_folder().rglob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_is_toml_1_0_and_locks(path: Path, tmp_path: Path) -> None:
    shipped = tomllib.loads(path.read_text(encoding="utf-8"))
    for plugin in shipped.get("requires", {}).get("plugins", []):
        pytest.importorskip(Requirement(plugin).name.replace("-", "_"))
    loaded = load_recipe(path.stem)
    assert loaded.recipe.name == path.stem
    lock = tmp_path / "recipe.lock.toml"
    lock.write_text(lock_text(loaded), encoding="utf-8")
    assert tomllib.loads(lock.read_text(encoding="utf-8")) == loaded.data
    assert load_recipe(lock).data == loaded.data


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_that_needs_files_says_where_they_are_from(path: Path) -> None:
    recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    folder = recipe.get("tokenizer", {}).get("path")
    assert (folder is not None) == ("assets" in recipe)
    if folder is not None:
        assert folder == f"./assets/{recipe['assets'].partition('/')[2]}"


def test_loading_is_torch_free_and_quick() -> None:
    code = """
import json, sys, time
from titancli.recipe import load_recipe
without_pydantic = "pydantic" not in sys.modules
load_recipe("llama3_debug")
heavy = [m for m in ("torch", "transformers", "datasets", "numpy", "rich") if m in sys.modules]
seconds = time.process_time()
from tests.yardstick import unit
print(json.dumps([heavy, without_pydantic, seconds / unit()]))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy, without_pydantic, units = json.loads(ran.stdout)
    assert heavy == [] and without_pydantic
    assert units < 60  # a third of it on an idle machine


def test_no_two_shipped_recipes_have_one_name() -> None:
    names = [path.stem for path in RECIPES]
    assert sorted(set(names)) == sorted(names)
