"""A registry of small components, and recipes in a folder that the test stands in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipe.components import registry_of
from titancli.errors import NOT_INSTALLED, Problem, RecipeError
from titancli.recipe import Loaded, load_recipe
from titancli.registry.lookup import Registry

BASE = """\
recipe = 1
name = "base"

[model]
type = "tiny"

[tokenizer]
type = "chars"

[dataset]
type = "lines"

[lr_scheduler]
warmup_steps = 0

[training]
steps = 1000
"""


@pytest.fixture
def registry() -> Registry:
    return registry_of()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`write(text, name="exp.toml")`: a file in the current directory, as a relative path."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "exp.toml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
        return path

    return write_file


@pytest.fixture
def load(write: Callable[..., Path], registry: Registry) -> Callable[..., Loaded]:
    """`load(text, *overrides, unset=())`: write the text and load it."""

    def load_text(text: str = BASE, *overrides: str, unset: tuple[str, ...] = ()) -> Loaded:
        return load_recipe(write(text), overrides, unset=unset, registry=registry)

    return load_text


@pytest.fixture
def problems(load: Callable[..., Loaded]) -> Callable[..., list[Problem]]:
    """`problems(text, *overrides)`: what is found wrong."""

    def problems_of(text: str, *overrides: str, unset: tuple[str, ...] = ()) -> list[Problem]:
        with pytest.raises(RecipeError) as caught:
            load(text, *overrides, unset=unset)
        missing = caught.value.problems[0].code in NOT_INSTALLED
        assert caught.value.exit_code == (4 if missing else 3)
        return caught.value.problems

    return problems_of


@pytest.fixture
def problem(problems: Callable[..., list[Problem]]) -> Callable[..., Problem]:
    """`problem(text, *overrides)`: the only thing that is found wrong."""

    def only_problem(text: str, *overrides: str, unset: tuple[str, ...] = ()) -> Problem:
        found = problems(text, *overrides, unset=unset)
        assert len(found) == 1, found
        return found[0]

    return only_problem
