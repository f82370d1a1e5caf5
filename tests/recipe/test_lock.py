"""The lock file runs again as it is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.recipe.components import registry_of
from tests.recipe.conftest import BASE
from titancli.errors import RecipeError
from titancli.recipe import Loaded, load_recipe, lock_text

FULL = (
    """\
description = "a \\"quoted\\" — text\\nof two lines"
weights = "w"
"""
    + BASE.replace('type = "tiny"', 'type = "tiny"\nflavor = "large"\nlayers = 3')
    + """
[dataset.columns]
"a.b" = 1
[[converters]]
type = "cast"
[[loggers]]
type = "book"
[optimizer]
type = "muon"
lr = 1e-05
groups = ["adamw"]
[optimizer.fallback]
type = "adamw"
"""
)


def again(loaded: Loaded, path: Path) -> Loaded:
    path.write_text(lock_text(loaded), encoding="utf-8")
    return load_recipe(path, registry=registry_of())


@pytest.mark.parametrize("text", [BASE, FULL], ids=["small", "full"])
def test_a_lock_file_gives_the_same_recipe(load, tmp_path: Path, text: str) -> None:
    loaded = load(text)
    second = again(loaded, tmp_path / "lock.toml")
    assert second.data == loaded.data
    assert second.recipe == loaded.recipe
    assert lock_text(second) == lock_text(loaded)


def test_a_lock_file_does_not_depend_on_where_the_command_runs(load, tmp_path: Path, monkeypatch) -> None:
    loaded = load(FULL)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert again(loaded, tmp_path / "lock.toml").data == loaded.data


def test_a_lock_file_is_toml_1_0_with_every_default_and_full_names(load) -> None:
    loaded = load(FULL)
    data = tomllib.loads(lock_text(loaded))
    assert data == loaded.data
    assert data["model"] == {
        "type": "titan/tiny",
        "flavor": "large",
        "dim": 512,
        "layers": 3,
        "rope": {"theta": 5e5, "factor": 8.0},
        "tied": False,
    }
    assert data["launcher"] == {"type": "titan/local", "nproc": "auto"}
    assert data["mesh"]["dp_shard"] == -1
    assert "global_batch_size" not in data["training"]


def test_a_lock_file_begins_with_what_it_is(load) -> None:
    assert lock_text(load(BASE)).startswith("# A resolved recipe, written by titan ")


FLOATS = st.floats(min_value=0, max_value=1e300, allow_nan=False, allow_infinity=False)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20),
    lr=FLOATS,
    columns=st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1), max_size=3),
    paths=st.lists(st.sampled_from(["a", "/b", "c d/e", "ü.txt"]), max_size=3),
)
def test_any_value_comes_back_from_the_lock_file(load, tmp_path: Path, text, lr, columns, paths) -> None:
    import tomli_w

    given_data = {
        "description": text,
        "optimizer": {"lr": lr},
        "dataset": {"type": "lines", "columns": columns, "paths": paths},
    }
    loaded = load(tomli_w.dumps(given_data) + BASE_WITHOUT_DATASET)
    assert loaded.recipe.description == text and loaded.recipe.optimizer.lr == lr
    assert loaded.recipe.dataset.columns == columns
    assert again(loaded, tmp_path / "lock.toml").data == loaded.data


BASE_WITHOUT_DATASET = """
[model]
type = "tiny"
[tokenizer]
type = "chars"
[lr_scheduler]
warmup_steps = 0
[training]
steps = 1000
"""


def test_a_hand_edited_lock_file_is_checked_like_any_recipe(load, tmp_path: Path) -> None:
    path = tmp_path / "lock.toml"
    path.write_text(lock_text(load(BASE)).replace("steps = 1000", "steps = 'x'"))
    with pytest.raises(RecipeError, match=r"training\.steps must be an integer"):
        load_recipe(path, registry=registry_of())


def test_a_lock_file_keeps_what_a_flavor_gives_only_since(tmp_path: Path) -> None:
    """It says None by leaving a key out; a flavor that fills it in by now changes no run that was begun."""
    path = tmp_path / "lock.toml"
    text = lock_text(load_recipe("llama4_17bx16e"))
    assert "every_n_layers_nope = 4\n" in text
    text = text.replace("every_n_layers_nope = 4\n", "").replace("fixed_attn_block_size = 8192\n", "")
    path.write_text(re.sub(r"\[model\.attn_temperature\]\n(\w.*\n)*", "", text))
    model = load_recipe(path).recipe.model
    assert (model.every_n_layers_nope, model.fixed_attn_block_size, model.attn_temperature) == (None,) * 3
