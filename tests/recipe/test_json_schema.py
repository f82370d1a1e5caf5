"""`titan recipe schema` says of recipes what titan says, as far as it can; judged by another's validator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
from packaging.requirements import Requirement

from tests import absent
from tests.recipe.conftest import BASE
from tests.recipe.test_lock import FULL
from titancli.errors import RecipeError
from titancli.recipe import bundled_folder, load_recipe
from titancli.recipe.json_schema import recipe_schema
from titancli.registry import current
from titancli.registry.fields import fields_of
from titancli.registry.lookup import Registry

jsonschema = pytest.importorskip("jsonschema")
RECIPES = sorted(bundled_folder().glob("*.toml"))
Mistakes = Callable[[str], list[Any]]


def validator(registry: Registry) -> Any:
    return jsonschema.Draft202012Validator(json.loads(json.dumps(recipe_schema(registry))))


@pytest.fixture(scope="module")
def installed() -> Any:
    return validator(current())


def test_it_is_a_json_schema(registry: Registry, installed: Any) -> None:
    for one in (installed, validator(registry)):
        one.check_schema(one.schema)


@pytest.fixture
def mistakes(registry: Registry) -> Mistakes:
    """`mistakes(text)`: what the schema of the test's own components finds wrong."""
    return lambda text: list(validator(registry).iter_errors(tomli.loads(text)))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_and_their_locks_fit(path: Path, installed: Any) -> None:
    shipped = tomli.loads(path.read_text(encoding="utf-8"))
    absent.need(*(Requirement(one).name for one in shipped.get("requires", {}).get("plugins", [])))
    installed.validate(shipped)
    installed.validate(load_recipe(path).data)


def test_every_installed_component_is_offered(installed: Any) -> None:
    definitions = installed.schema["$defs"]
    for name, cls in current().components():
        info = cls.__component__
        table = definitions[f"{info.kind}.{name.replace('/', '.')}"]
        assert name in table["properties"]["type"]["enum"]
        assert table["additionalProperties"] is False
        for field in fields_of(cls).values():
            assert table["properties"][field.name].get("description", "") == field.doc, (name, field.name)
    assert definitions["Training"]["properties"]["steps"]["description"].startswith("Total number of")
    assert '"null"' not in json.dumps(installed.schema)


@pytest.mark.parametrize("text", [BASE, FULL, 'extends = "x.toml"\n', 'extends = ["a"]\n[model]\ndim = 3\n'])
def test_good_recipes_fit(mistakes: Mistakes, text: str) -> None:
    assert mistakes(text) == []


BROKEN = {
    "unknown section": "[trainig]\n",
    "unknown key": "[mesh]\ndq = 1\n",
    "wrong type": '[checkpoint]\ninterval = "10"\n',
    "out of range": "[comm]\ninit_timeout_seconds = 0\n",
    "bad choice": '[activation_checkpoint]\nmode = "some"\n',
    "unknown component": '[optimizer]\ntype = "sgdx"\n',
    "unknown key of a component": '[loop]\ntype = "pretrain"\nfoo = 1\n',
    "an array that is none": '[loggers]\ntype = "x"\n',
    "an element without a type": "[[converters]]\nskip = []\n",
    "a degree of zero": "[mesh]\ntp = 0\n",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_broken_recipes_do_not_fit(
    mistakes: Mistakes, registry: Registry, write: Callable[..., Path], broken: str
) -> None:
    assert mistakes(BASE + broken)
    with pytest.raises(RecipeError):
        load_recipe(write(BASE + broken), registry=registry)


@pytest.mark.parametrize(
    ("broken", "path", "words"),
    [
        ('[loop]\ntype = "pretrain"\nfoo = 1\n', "loop", "'foo' was unexpected"),
        ('[optimizer]\ntype = "adamw"\nlr = "high"\n', "optimizer.lr", "'high' is not of type 'number'"),
        ('[optimizer]\ntype = "sgdx"\n', "optimizer.type", "'sgdx' is not one of"),
        ('[[loggers]]\ntype = "csv"\nfoo = 1\n', "loggers.0", "'foo' was unexpected"),
    ],
)
def test_an_editor_marks_the_key_that_is_wrong(installed: Any, broken: str, path: str, words: str) -> None:
    """One mistake, at one place: not that a section fits none of many alternatives."""
    data = tomli.loads(f'extends = "titan:llama3_debug"\n{broken}')
    [found] = installed.iter_errors(data)
    assert ".".join(map(str, found.absolute_path)) == path
    assert words in found.message


@pytest.mark.parametrize("section", ["model", "tokenizer", "dataset", "training"])
def test_what_a_recipe_needs_is_needed_unless_it_extends_another(mistakes: Mistakes, section: str) -> None:
    data = tomli.loads(BASE)
    del data[section]
    import tomli_w

    assert mistakes(tomli_w.dumps(data))
    assert mistakes(tomli_w.dumps({"extends": "base.toml", **data})) == []


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    from titancli.cli import main

    assert main(["recipe", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"].endswith("2020-12/schema")
