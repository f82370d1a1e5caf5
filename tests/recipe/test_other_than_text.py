"""What trains on something else than text needs no tokenizer, and need not be cut as a decoder is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import jsonschema
import pytest
import tomli

from tests.recipe.components import TARGET, registry_of
from tests.recipe.conftest import BASE
from titancli.errors import Problem, RecipeError
from titancli.recipe import load_recipe
from titancli.recipe.json_schema import recipe_schema
from titancli.recipe.layout import takes
from titancli.registry.component import component


@component("dataset", "pictures", target=TARGET)
class Pictures:
    needs_tokenizer: ClassVar[bool] = False


@component("model", "painter", target=TARGET)
class Painter:
    mesh_degrees: ClassVar[tuple[str, ...]] = ("dp_replicate", "dp_shard")
    n_layers: int = 2


REGISTRY = registry_of(("art", Pictures), ("art", Painter))
PICTURES = BASE.replace("lines", "pictures").replace('[tokenizer]\ntype = "chars"\n', "")
PAINTER = PICTURES.replace("tiny", "painter")


@pytest.fixture
def told(write: Callable[..., Path]) -> Callable[..., list[Problem]]:
    def problems(text: str, *overrides: str) -> list[Problem]:
        with pytest.raises(RecipeError) as caught:
            load_recipe(write(text), overrides, registry=REGISTRY)
        return caught.value.problems

    return problems


def test_a_dataset_that_needs_no_tokenizer_gets_none(write: Callable[..., Path]) -> None:
    loaded = load_recipe(write(PICTURES), registry=REGISTRY)
    assert loaded.recipe.tokenizer is None and "tokenizer" not in loaded.data
    assert load_recipe(write(BASE), registry=REGISTRY).recipe.tokenizer is not None


def test_every_other_dataset_needs_one(told: Callable[..., list[Problem]]) -> None:
    (found,) = told(PICTURES.replace("pictures", "lines"))
    assert (found.code, found.message) == ("missing-key", "the recipe has no [tokenizer]")
    beside = told(PICTURES.replace("pictures", "lines"), "training.steps=x")
    assert {problem.code for problem in beside} == {"missing-key", "wrong-type"}


def test_a_tokenizer_that_nobody_asks_is_refused_where_it_stands(told: Callable[..., list[Problem]]) -> None:
    (found,) = told(BASE.replace("lines", "pictures"))
    assert found.message == "the dataset pictures does not use a tokenizer" and found.location.line == 7


def test_the_schema_for_editors_says_the_same() -> None:
    schema = jsonschema.Draft202012Validator(json.loads(json.dumps(recipe_schema(REGISTRY))))
    assert list(schema.iter_errors(tomli.loads(PICTURES))) == []
    assert list(schema.iter_errors(tomli.loads(BASE))) == []
    assert list(schema.iter_errors(tomli.loads(PICTURES.replace("pictures", "lines"))))


def test_degrees_that_a_model_cannot_be_cut_by_are_refused_at_their_line(
    told: Callable[..., list[Problem]], write: Callable[..., Path]
) -> None:
    found = told(PAINTER, "mesh.pp=2", "mesh.cp=2", "mesh.tp=3", "mesh.ep=2")
    assert [p.message for p in found] == [
        f"mesh.{name}: the model painter can only be sharded by dp_replicate and dp_shard"
        for name in ("pp = 2", "cp = 2", "tp = 3", "ep = 2")
    ]
    assert [p.hint for p in found] == [f"set mesh.{name} = 1" for name in ("pp", "cp", "tp", "ep")]
    assert [p.location.source for p in found] == ["mesh.pp=2", "mesh.cp=2", "mesh.tp=3", "mesh.ep=2"]
    recipe = load_recipe(write(PAINTER), ["mesh.dp_replicate=2"], registry=REGISTRY).recipe
    assert takes(recipe, "dp_shard", 4) and not takes(recipe, "tp", 2)
