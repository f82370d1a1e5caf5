"""A config.json that somebody else has written: right, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from titancli.checkpoint.hf.detect_model import model_of
from titancli.cli.finetune import model_section
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.recipe.load import load_recipe, model_in
from titancli.registry import current

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 8}


@pytest.mark.parametrize("kind", [[], ["llama"], None, 3, True, {"a": 1}])
def test_model_type_is_a_text(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": kind}))
    for read in (model_in, lambda folder: model_section(folder, current())):
        with pytest.raises(EnvironmentProblem, match="has no model_type") as caught:
            read(tmp_path)
        assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "null", "3", "[" * 100_000, '{"model_type": 1' + "0" * 5000 + "}"])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EnvironmentProblem, match=r"config\.json is damaged"):
        model_in(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_attention_heads", 0), ("rope_scaling", [1]), ("quantization_config", {"quant_method": []})],
)
def test_values_that_make_no_sense(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama", key: value}))
    with pytest.raises(EnvironmentProblem):
        model_in(tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "tie_word_embeddings"])
@pytest.mark.parametrize("value", ["64", {"a": 1}, [4], 0.5, -1])
def test_a_wrong_type_is_named(tmp_path: Path, key: str, value: Any) -> None:
    """pydantic's own error names a field of titan's, and no file."""
    _refused(tmp_path, "llama", key, value)


def test_a_boolean_is_no_size(tmp_path: Path) -> None:
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        _refused(tmp_path, "llama", key, True)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_layers_without_an_end(tmp_path: Path, family: str) -> None:
    """A list of their kinds would take all memory."""
    _refused(tmp_path, family, "num_hidden_layers", 10**12)


def _refused(folder: Path, family: str, key: str, value: Any) -> None:
    file = folder / "config.json"
    more = {"intermediate_size": 128, "head_dim": 16, "num_key_value_heads": 4}
    file.write_text(json.dumps({**SMALL, **more, "model_type": family, key: value}))
    recipe = folder / "r.toml"
    recipe.write_text(
        f'weights = "{folder}"\ntokenizer = "byte"\n[dataset]\ntype = "text_files"\npaths = ["{recipe}"]\n'
        "[training]\nsteps = 1\n"
    )
    for read in (model_in, lambda folder: model_of(folder, None), lambda folder: load_recipe(recipe)):
        with pytest.raises((EnvironmentProblem, RecipeError)) as caught:
            read(folder)
        assert str(file) in str(caught.value) and key in str(caught.value)


@pytest.mark.parametrize("kind", [[], {"a": 1}, 3, True])
def test_a_type_of_weights_is_a_text(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": kind}))
    with pytest.raises(EnvironmentProblem, match="has no model_type"):
        model_of(tmp_path, None)
