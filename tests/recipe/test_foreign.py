"""Keys and files of other trainers, as plugins know them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.recipe.components import registry_of
from tests.recipe.conftest import BASE
from titancli.errors import RecipeError
from titancli.recipe import load_recipe
from titancli.recipe.foreign import refuse_foreign
from titancli.registry.hookspecs import hookimpl
from titancli.registry.lookup import Registry
from titancli.registry.plugins import Plugin


def registry_with(keys: Any = None, config: Any = None, *, raises: bool = False) -> Registry:
    """Return the registry of the tests and a plugin that knows another trainer."""

    def titan_foreign_keys() -> Any:
        if raises:
            raise ValueError("broken")
        return keys

    def titan_foreign_config(text: str) -> Any:
        if raises:
            raise ValueError("broken")
        return config if "theirs" in text else None

    hooks = SimpleNamespace(
        titan_foreign_keys=hookimpl(titan_foreign_keys), titan_foreign_config=hookimpl(titan_foreign_config)
    )
    own = registry_of()
    return Registry([*own._plugins.values(), Plugin("other", lambda: hooks)])


def refused(path: Path, registry: Registry, *overrides: str) -> Any:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides, registry=registry)
    return caught.value.problems


def test_key_is_titans_or_words(write: Any) -> None:
    registry = registry_with({"max_steps": "training.steps", "job.x": "say y", "rows": "training: words"})
    path = write(BASE.replace("steps = 1000", "max_steps = 1000"))
    [found] = refused(path, registry)  # the key that it stands for is not said to be missing
    assert (found.message, found.hint) == ("unknown key 'max_steps' in training", "in titan: training.steps")
    assert refused(write(BASE), registry, "max-steps=5")[0].hint == "in titan: training.steps=5"
    assert refused(write(BASE), registry, "rows=5")[0].hint == "in titan: training: words"


@pytest.mark.parametrize("keys", [None, ["a"], "raises"])
def test_plugin_that_answers_wrongly_costs_its_hints_alone(write: Any, keys: Any) -> None:
    registry = registry_with(keys, ["no pair"], raises=keys == "raises")
    [found] = refused(write(f"{BASE}# theirs\n"), registry, "zzz=5")
    assert found.code == "unknown-key" and found.hint is None
    assert keys is None or registry.broken == ["other"]


def test_config_of_another_trainer_is_one_problem(write: Any) -> None:
    registry = registry_with({}, ("Theirs", "recipe from-theirs"))
    path = write("[theirs]\na = 1\n[model]\n", "a b.toml")
    [found] = refused(path, registry)
    assert (found.code, found.hint) == (
        "foreign-config",
        "convert it: titan recipe from-theirs 'a b.toml' OUT.toml",
    )


def test_right_recipe_is_never_asked_about(write: Any) -> None:
    registry = registry_with(raises=True)
    load_recipe(write(f"{BASE}# theirs\n"), registry=registry)
    assert registry.broken == []


@pytest.mark.parametrize("name", ["a.yaml", "a.YML", "sub/a.yml"])
def test_yaml_is_told_how_to_convert_it(write: Any, registry: Registry, name: str) -> None:
    [found] = refused(write("a: 1\n", name), registry)
    assert found.message == f"{name} is YAML, and a recipe is TOML"
    assert "titan recipe from-axolotl, titan recipe from-llamafactory" in found.hint


def test_dangling_link_is_not_its_own_hint(tmp_path: Path, registry: Registry) -> None:
    (tmp_path / "mine.toml").symlink_to("gone.toml")
    [found] = refused(tmp_path / "mine.toml", registry)
    assert "did you mean" not in found.hint


def test_pipe_is_not_waited_for(tmp_path: Path, registry: Registry) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    refuse_foreign(tmp_path / "a.yaml", registry)  # reading it as a recipe says what is wrong
