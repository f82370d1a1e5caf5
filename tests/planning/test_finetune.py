"""The recipes for fine-tuning fit the GPU that they name, with the figures that are written in them."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from tests.docs.markdown import ROOT
from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import estimate
from titancli.recipe import load_recipe


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune_figures", ROOT / "benchmarks" / "finetune.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses ask for it
    spec.loader.exec_module(module)
    return module


def test_each_fits_its_gpu_as_it_says_and_as_the_table_says(made: ModuleType) -> None:
    pytest.importorskip("titan_distil")
    pytest.importorskip("titan_qlora")
    found = [made.planned(name, file) for name, file in made.recipes().items()]
    assert len(found) >= 22
    for one, file in zip(found, made.recipes().values(), strict=True):
        assert one.line in file.read_text().splitlines(), "run: python benchmarks/finetune.py --write"
        assert f"one GPU of {one.memory} GB" in one.recipe.description
    page = made.PAGE.read_text()
    assert made.page_with(page, made.table(found)) == page, "run: python benchmarks/finetune.py --write"


def test_each_says_how_it_is_downloaded_and_started_and_has_a_debug_twin(made: ModuleType) -> None:
    pytest.importorskip("titan_distil")
    for name, file in made.recipes().items():
        text, recipe = file.read_text(), load_recipe(file).recipe
        commands = re.findall(r"^# titan (\w+) (\S+)", text, re.MULTILINE)
        assert commands[0] == ("download", name) and commands[-1] == ("train", name), name
        assert recipe.weights == recipe.tokenizer.path, name
        assert recipe.weights.name == recipe.assets.partition("/")[2], name
        method, model = file.stem.split("_", 1)
        assert (file.parent / f"{method}_{model.rpartition('_')[0]}_debug.toml").is_file(), name


def test_the_teacher_of_a_distillation_is_planned_as_what_it_is() -> None:
    pytest.importorskip("titan_distil")
    recipe = load_recipe("titan-distil:distil_qwen3_0.6b").recipe
    found = estimate(recipe, recipe.degrees(1), DEVICES["H100"])
    assert found is not None and found.worst.classes["frozen"] == 2 * 8_190_735_360
