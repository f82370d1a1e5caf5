"""Whatever a file or an override says, the answer is a recipe or a RecipeError, never anything else."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.recipe.components import registry_of
from tests.recipe.test_lock import FULL
from tests.recipe.test_scan import SCALARS, VALUES, documents
from titancli.errors import RecipeError
from titancli.recipe import load_recipe, lock_text, render_problems

REGISTRY = registry_of()
NAMES = """
    model model.type model.flavor model.dim model.rope model.rope.factor tokenizer.path dataset.paths
    dataset.columns dataset.columns.x dataset.shape dataset.shape.0 converters converters.0 converters.1
    converters.0.recipe converters.0.skip.0 optimizer optimizer.type optimizer.fallback mesh mesh.tp
    optimizer.fallback.type optimizer.groups optimizer.groups.0.lr training training.steps recipe name loss
    requires requires.plugins requires.titan loggers loggers.0.folder extends x.y.z loop.type weights a.0.b
"""
KEYS = st.sampled_from(NAMES.split())
VALUE = st.one_of(
    SCALARS,
    VALUES,
    st.sampled_from(["adamw", "muon", '["cast"]', '{type = "muon"}', "[{}]", "{}", "[[]]", "large", ""]),
)
QUIET = settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def try_loading(path: Path, overrides: list[str], unset: list[str]) -> None:
    try:
        loaded = load_recipe(path, overrides, unset=unset, registry=REGISTRY)
    except RecipeError as error:
        assert error.problems
        for style in ("text", "json", "github"):
            assert render_problems(error.problems, style)
        return
    lock = path.with_name("lock.toml")
    lock.write_text(lock_text(loaded), encoding="utf-8")
    assert load_recipe(lock, registry=REGISTRY).data == loaded.data


@QUIET
@given(documents())
def test_any_toml_document(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    try_loading(path, [], [])


@QUIET
@given(st.binary(max_size=40))
def test_any_bytes(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(raw)
    try_loading(path, [], [])


@QUIET
@given(
    st.lists(st.tuples(KEYS, VALUE).map(lambda pair: "=".join(pair)), max_size=4), st.lists(KEYS, max_size=2)
)
def test_any_overrides(tmp_path: Path, overrides: list[str], unset: list[str]) -> None:
    path = tmp_path / "x.toml"
    path.write_text(FULL, encoding="utf-8")
    try_loading(path, overrides, unset)


@QUIET
@given(st.lists(st.text(max_size=12), max_size=3))
def test_any_arguments(tmp_path: Path, arguments: list[str]) -> None:
    path = tmp_path / "x.toml"
    path.write_text(FULL, encoding="utf-8")
    try_loading(path, arguments, arguments)
