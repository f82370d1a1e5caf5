"""A plugin that offers names which titan has too changes nothing for those who never wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Titan, titan  # noqa: F401 - a fixture
from tests.registry.distributions import Site
from titan_testing import recipe
from titancli import registry as registries
from titancli.builtin import titan_components
from titancli.errors import RecipeError
from titancli.recipe import load_recipe, lock_text
from titancli.recipe.find import bundled_folder
from titancli.registry.component import component_info
from titancli.registry.discover import load_plugins


def everything(*only: str) -> str:
    """The code of a plugin that offers each name that titan has, or only these of them."""
    lines = ["from titancli import component, hookimpl", "ALL = []"]
    for number, config in enumerate(titan_components()):
        info = component_info(config)
        if not only or f"{info.kind}/{info.name}" in only:
            lines += [f"@component({info.kind!r}, {info.name!r}, target={info.target!r})"]
            lines += [f"class C{number}: pass", f"ALL.append(C{number})"]
    return "\n".join([*lines, "@hookimpl", "def titan_components(): return ALL", ""])


def test_titans_recipes_and_defaults_mean_titans_components(site: Site, tmp_path: Path) -> None:
    alone = load_plugins()
    site.add("aaa", everything())
    both = load_plugins()
    recipe(tmp_path)
    for file in [*bundled_folder().glob("*.toml"), tmp_path / "recipe.toml"]:
        before = load_recipe(file, registry=alone)
        assert lock_text(load_recipe(file, registry=both)) == lock_text(before), file


def test_a_recipe_of_a_plugin_means_its_own_and_then_titans(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "mine.toml").write_text(
        'recipe = 1\nextends = "titan:llama3_debug"\nloss = "cross_entropy"\noptimizer = "adamw"\n'
    )
    own = f"import pathlib\n@hookimpl\ndef titan_recipes(): return pathlib.Path({str(folder)!r})\n"
    site.add("lab", everything("loss/cross_entropy") + own)
    site.add("other", everything())
    loaded = load_recipe(folder / "mine.toml", registry=load_plugins())
    assert (loaded.data["loss"]["type"], loaded.data["optimizer"]["type"]) == (
        "lab/cross_entropy",
        "titan/adamw",
    )


@pytest.mark.parametrize("override", ["loss=cross_entropy", "optimizer.type=adamw"])
def test_a_name_that_somebody_wrote_is_not_guessed(site: Site, tmp_path: Path, override: str) -> None:
    site.add("aaa", everything())
    both = load_plugins()
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe(tmp_path), [override], registry=both)
    [problem] = caught.value.problems
    name = override.rpartition("=")[2]
    assert problem.code == "ambiguous-component"
    assert f"'aaa/{name}' or 'titan/{name}'" in (problem.hint or "")


def test_a_full_name_over_a_default_is_another_component(site: Site, tmp_path: Path) -> None:
    """What is said of titan's optimizer does not go to a plugin's because they have a bare name in common."""
    site.add("aaa", everything())
    file = recipe(tmp_path, "[optimizer]\nlr = 0.5")
    loaded = load_recipe(file, ["optimizer=aaa/adamw"], registry=load_plugins())
    assert loaded.data["optimizer"] == {"type": "aaa/adamw"}


@pytest.mark.parametrize("extends", [False, True])
def test_a_full_name_over_a_bundled_recipes_bare_name_is_another_component(
    site: Site, tmp_path: Path, extends: bool
) -> None:
    site.add("aaa", everything())
    reference = "llama3_debug"  # which says: type = "adamw", lr = 2e-3
    if extends:
        reference = str(tmp_path / "own.toml")
        Path(reference).write_text('recipe = 1\nextends = "titan:llama3_debug"\n')
    loaded = load_recipe(reference, ["optimizer=aaa/adamw"], registry=load_plugins())
    assert loaded.data["optimizer"] == {"type": "aaa/adamw"}
    kept = load_recipe(reference, ["optimizer=titan/adamw"], registry=load_plugins())
    assert kept.data["optimizer"]["lr"] == 2e-3


def test_the_commands_tell_of_the_clash(titan: Titan, site: Site) -> None:  # noqa: F811
    site.add("aaa", everything())
    registries.configure()
    done = titan("plugin", "list")
    assert done.code == 0 and "loss/cross_entropy" in done.out and "another plugin has this name" in done.out
    assert "full names" in titan("plugin", "show", "aaa").out
    line = next(line for line in titan("doctor").out.splitlines() if "plugin aaa" in line)
    assert line.startswith("warning") and "loss/cross_entropy" in line
