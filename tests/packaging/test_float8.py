"""titan-float8 is a package of its own: titan finds it, and without it the recipe says what to install."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packaging.conftest import CHECKOUT, Environment, wheel_of

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def float8(titan_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("float8") / "venv")
    project = CHECKOUT / "plugins" / "titan-float8"
    environment.install(titan_wheel, wheel_of(project, tmp_path_factory.mktemp("wheel-float8")))
    return environment


def test_its_wheel_brings_the_component(float8: Environment) -> None:
    done = float8.titan("plugin", "list", "--json")
    plugins = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert plugins["titan-float8"]["state"] == "ok", done.stderr
    assert plugins["titan-float8"]["components"] == [
        f"converter/{name}_{what}" for name in ("float8", "mxfp8", "nvfp4") for what in ("linear", "experts")
    ]
    assert plugins["titan-float8"]["torch"] is False


def test_its_recipe_is_valid(float8: Environment) -> None:
    done = float8.titan("validate", "llama3_8b_float8", "--recipe-only")
    assert (done.returncode, done.stdout) == (0, "ok: llama3_8b_float8\n"), done.stderr


def test_without_it_the_recipe_says_what_to_install(plain: Environment) -> None:
    done = plain.titan("validate", "llama3_8b_float8")
    assert done.returncode == 4
    assert "requires the plugin titan-float8>=0.1, which is not installed" in done.stderr
    assert "pip install 'titan-float8>=0.1'" in done.stderr
    assert "unknown converter" not in done.stderr
