"""[model] of hf_causal_lm: a folder or a table, read with the recipe, and what of it is wrong at its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models.hf_configs import CONFIGS, LLAMA
from titan_transformers import HFCausalLM
from titan_transformers.config_json import decoded, encoded
from titan_transformers.tiny import tiny
from titancli.errors import Problem, RecipeError
from titancli.recipe import load_recipe, lock_text

RECIPE = """\
recipe = 1
name = "any"

[model]
type = "hf_causal_lm"
config = "./folder"

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


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def write(here: Path) -> Callable[..., None]:
    """`write(values)`: what stands in folder/config.json."""

    def write_config(values: Any) -> None:
        (here / "folder").mkdir(exist_ok=True)
        text = values if isinstance(values, str) else json.dumps(values)
        (here / "folder" / "config.json").write_text(text)

    return write_config


def wrong(*overrides: str) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        load_recipe("exp.toml", overrides)
    return caught.value.problems


def test_the_lock_file_holds_what_was_in_the_folder(here: Path, write: Callable[..., None]) -> None:
    values = {**LLAMA, "sliding_window": None, "rope_scaling": {"factor": 2.0, "rope_type": None}}
    write(values)
    loaded = load_recipe(
        "exp.toml", ["model.config.num_hidden_layers=1", "model.config.rope_scaling.factor=4.0"]
    )
    rope = {"factor": 4.0, "rope_type": None}
    assert loaded.recipe.model.values == {**values, "num_hidden_layers": 1, "rope_scaling": rope}
    lock = lock_text(loaded)
    assert tomli.loads(lock)["model"]["config"]["sliding_window"] == "null"
    (here / "folder" / "config.json").unlink()
    (here / "lock.toml").write_text(lock)
    assert load_recipe("lock.toml").recipe.model == loaded.recipe.model


def test_a_folder_over_a_table_leaves_nothing_of_it(here: Path, write: Callable[..., None]) -> None:
    write(LLAMA)
    loaded = load_recipe(
        "titan-transformers:hf_causal_lm_debug", ["model.config=./folder", "training.seq_len=64"]
    )
    assert loaded.recipe.model.values == LLAMA
    with pytest.raises(RecipeError, match="folder nowhere does not exist"):
        load_recipe("titan-transformers:hf_causal_lm_debug", ["model.config=./nowhere"])


def test_null_goes_both_ways() -> None:
    values = {"a": None, "b": [1, None, {"c": None}], "d": "text"}
    assert decoded(encoded(values)) == values
    assert None not in encoded(values).values()


def test_a_folder_and_its_table_are_the_same_model(here: Path, write: Callable[..., None]) -> None:
    write(LLAMA)
    assert HFCausalLM(config=here / "folder").values == HFCausalLM(config=LLAMA).values


def told(problems: list[Problem]) -> str:
    assert len(problems) == 1, problems
    at = problems[0].location
    assert at is not None and at.source == 'config = "./folder"', problems
    return problems[0].message


def test_a_folder_that_is_not_there(here: Path) -> None:
    assert told(wrong()) == "model.config: folder folder does not exist"


def test_a_folder_without_a_config(here: Path) -> None:
    (here / "folder").mkdir()
    assert told(wrong()) == "model.config: folder has no config.json"


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_config_that_is_no_object(write: Callable[..., None], text: str) -> None:
    write(text)
    assert "folder/config.json" in told(wrong())


ORIGINAL = "original_max_position_embeddings"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no model_type": ({"hidden_size": 8}, "config.json has no model_type"),
    "code": (
        {**LLAMA, "auto_map": {"AutoConfig": "code.Config"}},
        "which titan does not run; remove the key if transformers' own llama is meant",
    ),
    "kernel": ({**LLAMA, "attn_implementation": "who/k"}, "attn_implementation = 'who/k' names a kernel on"),
    "kernel below": (
        {**LLAMA, "x": {"_attn_implementation": "who/k"}},
        "names a kernel on the Hub, which is",
    ),
    "kernel of experts": ({**LLAMA, "experts_implementation": {"": "who/k"}}, "that titan does not run"),
    "gptq": (
        {**LLAMA, "quantization_config": {"quant_method": "gptq"}},
        "the weights are quantized with 'gptq'; read are fp8",
    ),
    "routers": ({**LLAMA, "output_router_logits": True}, "the routers' own loss (output_router_logits)"),
    "encoder": ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder-decoder model"),
    "longrope": (
        {**LLAMA, "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 32},
        "training.seq_len 64 is beyond 32: beyond it, RoPE of the type longrope depends on",
    ),
    "one of two kinds of layers": (
        {**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "longrope"} | {ORIGINAL: 48}}},
        "training.seq_len 64 is beyond 48: beyond it, RoPE of the type longrope depends on",
    ),
    "short": ({**LLAMA, "max_position_embeddings": 32}, "training.seq_len 64 is beyond the model's 32"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_wrong_is_told_where_the_folder_is_named(write: Callable[..., None], case: str) -> None:
    values, words = FAULTS[case]
    write(values)
    assert words in told(wrong())


def test_degrees_that_it_is_not_cut_by(write: Callable[..., None]) -> None:
    write(LLAMA)
    load_recipe("exp.toml", ["mesh.cp=2"])
    message = " ".join(problem.message for problem in wrong("mesh.ep=2"))
    assert "llama has no stacked experts" in message


def test_rows_are_not_sharded_where_tokens_meet_outside_of_attention(write: Callable[..., None]) -> None:
    write({**tiny(CONFIG_MAPPING["bloom"]().to_dict()), "model_type": "bloom"})
    load_recipe("exp.toml")
    assert told(wrong("mesh.cp=2")).startswith(
        "mesh.cp = 2: bloom: rows cannot be sharded, because not only titan's attention joins tokens ("
    )


def test_an_export_that_would_fail_is_told_before_the_run(write: Callable[..., None]) -> None:
    write({**tiny(CONFIG_MAPPING["hrm_text"]().to_dict()), "model_type": "hrm_text"})
    load_recipe("exp.toml")
    assert told(wrong("checkpoint.last_save_in_hf=true")).startswith(
        "checkpoint.last_save_in_hf: hrm_text: the rules by which transformers reads a folder "
    )


def test_tensor_parallel_needs_a_plan_and_sizes_that_it_divides(write: Callable[..., None]) -> None:
    write(CONFIGS["gpt2"])
    assert told(wrong("mesh.tp=2")) == (
        "mesh.tp = 2: transformers declares no tensor parallel plan for gpt2, and its layers have other names"
    )
    write(LLAMA)
    load_recipe("exp.toml", ["mesh.tp=2"])
    assert "mesh.tp = 4 does not divide n_kv_heads 2" in wrong("mesh.tp=4")[0].message
