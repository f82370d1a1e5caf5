"""The plugin is sound by the kit's rules; without it, recipes and folders of its families say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_families import FAMILIES
from titan_testing import check_plugin, run_cli
from titancli import registry
from titancli.errors import PluginError
from titancli.recipe.load import readers_of
from titancli.registry.first_party import MODEL_TYPES
from titancli.registry.lookup import Registry


@pytest.fixture(autouse=True)
def all_plugins_again() -> Iterator[None]:
    """Plugins that a command has blocked are blocked in this process."""
    yield
    registry.configure()


def test_the_plugin_is_sound() -> None:
    check_plugin("titan-families")


def test_each_model_type_that_it_reads_is_known_where_it_is_not_installed() -> None:
    read = {kind for family in FAMILIES for kind in family.model_types}  # type: ignore[attr-defined]
    assert read == {kind for kind, plugin in MODEL_TYPES.items() if plugin == "titan-families"}
    with pytest.raises(PluginError, match="'mixtral' is read by titan-families, which is not installed"):
        readers_of("mixtral", Registry())


@pytest.mark.parametrize(
    "arguments", [("validate", "llama4_debug"), ("validate", "llama3_debug", "model.type=mixtral")]
)
def test_without_it_a_recipe_says_what_to_install(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run_cli(*arguments, "-p", "no:titan-families", cwd=tmp_path)
    assert done.code in (3, 4) and "titan-families" in done.stderr


def test_its_recipes_need_it_by_name() -> None:
    found = json.loads(run_cli("recipe", "show", "deepseek_v3_671b", "--json").stdout)
    assert "titan-families>=0.1" in json.dumps(found)
