"""A recipe without [model] whose weights are a Hugging Face folder trains the folder's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli

from titancli.errors import Problem, RecipeError
from titancli.models import Llama3, Qwen3
from titancli.recipe import load_recipe, lock_text

RECIPE = """\
recipe = 1
name = "tuned"
weights = "./folder"

[tokenizer]
type = "byte"

[dataset]
type = "python_stdlib"

[lr_scheduler]
warmup_steps = 0

[training]
steps = 10
seq_len = 64
"""
QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 300,
    "rope_theta": 12345.0,
    "rms_norm_eps": 1e-3,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.toml").write_text(RECIPE)
    (tmp_path / "folder").mkdir()
    return tmp_path


def write(here: Path, **change: Any) -> None:
    (here / "folder/config.json").write_text(json.dumps({**QWEN, **change}))


def wrong(*overrides: str) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        load_recipe("exp.toml", overrides)
    return caught.value.problems


def test_the_folders_model_is_the_recipes(here: Path) -> None:
    write(here)
    loaded = load_recipe("exp.toml")
    model = loaded.recipe.model
    assert isinstance(model, Qwen3)
    assert (model.dim, model.rope_theta, model.norm_eps, model.hidden_dim) == (32, 12345.0, 1e-3, 48)
    assert str(loaded.origins["model.rope_theta"]) == "folder/config.json (exp.toml:3)"


def test_the_lock_file_needs_the_folder_no_longer(here: Path) -> None:
    write(here)
    loaded = load_recipe("exp.toml")
    lock = lock_text(loaded)
    assert tomli.loads(lock)["model"]["type"] == "titan/qwen3"
    (here / "folder/config.json").unlink()
    (here / "lock.toml").write_text(lock)
    assert load_recipe("lock.toml").recipe.model == loaded.recipe.model


def test_keys_that_stand_in_model_win(here: Path) -> None:
    write(here)
    assert load_recipe("exp.toml", ["model.max_seq_len=77"]).recipe.model.max_seq_len == 77
    (here / "exp.toml").write_text(RECIPE + "[model]\nmax_seq_len = 78\n")
    assert load_recipe("exp.toml").recipe.model.max_seq_len == 78


def test_a_model_with_a_type_is_not_touched(here: Path) -> None:
    write(here)
    model = load_recipe("exp.toml", ["model.type=llama3", "model.flavor=debugmodel"]).recipe.model
    assert isinstance(model, Llama3)
    assert model.dim == 256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping = 30.0, which",
        ),
        ({"model_type": "mamba"}, "none of titan's own models reads model_type 'mamba'"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
    ],
)
def test_a_folder_that_says_too_little_or_too_much_is_refused_at_its_line(
    here: Path, change: dict[str, Any], words: str
) -> None:
    write(here, **change)
    [problem] = wrong()
    assert words in problem.message
    assert problem.location is not None
    assert problem.location.source == 'weights = "./folder"'


@pytest.mark.parametrize("overrides", [(), ("model.rope_theta=5.0",)])
def test_a_folder_that_is_not_there_is_the_one_problem(here: Path, overrides: tuple[str, ...]) -> None:
    [problem] = wrong(*overrides)  # not also: the recipe has no [model]
    assert f"{Path('folder/config.json')} does not exist" in problem.message
    assert "relative paths start at the current folder" in (problem.hint or "")
    assert problem.location is not None
    assert problem.location.source == 'weights = "./folder"'


def test_a_url_gives_no_model(here: Path) -> None:
    (here / "exp.toml").write_text(RECIPE.replace("./folder", "s3://bucket/step-5"))
    [problem] = wrong()
    assert "not a folder on this machine" in problem.message


@pytest.mark.parametrize("name", ["recipe.lock.toml", "manifest.json"])
def test_a_run_or_a_checkpoint_gives_no_model_and_says_where_it_is(here: Path, name: str) -> None:
    (here / "folder" / name).write_text("")
    [problem] = wrong()
    assert "./folder is a titan run or checkpoint" in problem.message
    assert "copy [model] from folder/recipe.lock.toml" in (problem.hint or "")


def test_neither_weights_nor_a_model_is_told_with_what_may_stand_there(here: Path) -> None:
    (here / "exp.toml").write_text(RECIPE.replace('weights = "./folder"', ""))
    [problem] = wrong()
    assert "the recipe has no [model]" in problem.message
    assert "to use the model of that folder" in (problem.hint or "")


def test_a_key_that_the_model_does_not_have_cannot_be_meant_to_differ(here: Path) -> None:
    write(here)
    [problem] = wrong('checkpoint.model_differs=["rope_teta", "norm_eps"]')
    assert (problem.message, problem.hint) == (
        "the model qwen3 has no 'rope_teta'",
        "did you mean 'rope_theta'?",
    )


def test_the_schema_asks_for_a_model_or_weights(here: Path) -> None:
    check_with = pytest.importorskip("jsonschema").Draft202012Validator
    from titancli.recipe.json_schema import recipe_schema
    from titancli.registry import current

    check = check_with(json.loads(json.dumps(recipe_schema(current()))))
    recipe = tomli.loads(RECIPE)
    assert not list(check.iter_errors(recipe))
    assert list(check.iter_errors({key: value for key, value in recipe.items() if key != "weights"}))
