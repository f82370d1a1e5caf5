"""A config.json that somebody else has written: right, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from titancli.cli.finetune import model_section
from titancli.errors import EnvironmentProblem
from titancli.recipe.load import model_in
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
