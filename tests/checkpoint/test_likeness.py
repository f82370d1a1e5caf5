"""Weights are taken for a recipe's model only if they were made by it, field by field."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_families import DeepSeekV3, Llama4
from titan_transformers import HFCausalLM
from titancli.checkpoint.hf.config_match import complaint, differing_fields
from titancli.errors import EnvironmentProblem
from titancli.models import GptOss, Llama3, Qwen3
from titancli.models.sections import MoE
from titancli.registry import current
from titancli.registry.binding import bind

QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "architectures": ["Qwen3ForCausalLM"],
    "eos_token_id": [1, 2],
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "attention_dropout": 0.0,
}
MODEL = Qwen3(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=48, vocab_size=64)
LLAMA = {key: QWEN[key] for key in list(QWEN)[1:10]} | {"model_type": "llama", "rope_theta": 500000.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def write(keys: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(keys))
        return tmp_path

    return write  # type: ignore[return-value]


def test_the_same_model_passes_whatever_it_was_trained_with(folder: Any) -> None:
    assert complaint(MODEL, folder(QWEN), ()) is None
    assert complaint(replace(MODEL, max_seq_len=128), folder(QWEN), ()) is None


def test_every_difference_is_named_with_the_line_to_write(folder: Any) -> None:
    there = folder({**QWEN, "rope_theta": 10000000.0, "rms_norm_eps": 1e-3, "tie_word_embeddings": True})
    found = complaint(MODEL, there, ())
    assert found is not None
    message, hint = found
    assert "rope_theta is 1000000.0 in the recipe and 10000000.0 there" in message
    assert "norm_eps is 1e-06 in the recipe and 0.001 there" in message
    assert "tied is false in the recipe and true there" in message
    assert "rope_theta = 10000000.0" in hint
    assert 'checkpoint.model_differs = ["norm_eps", "rope_theta", "tied"]' in hint
    assert complaint(MODEL, there, ("norm_eps", "rope_theta", "tied")) is None
    left = complaint(MODEL, there, ("rope_theta", "norm_eps"))
    assert left is not None
    assert "rope_theta" not in left[0]


def test_a_section_that_one_side_lacks_is_a_difference(folder: Any) -> None:
    plain = Llama3(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=48, vocab_size=64)
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64, "rope_type": "llama3"}
    there = folder({**LLAMA, "rope_scaling": rope, "rms_norm_eps": 1e-5})
    found = complaint(plain, there, ())
    assert found is not None
    assert "rope_scaling is not set in the recipe" in found[0]
    assert "rope_scaling = { factor = 8.0, low_freq_factor = 1.0" in found[1]
    assert complaint(plain, there, ("rope_scaling",)) is None
    found = complaint(MODEL, folder({**QWEN, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), ())
    assert found is not None
    assert "rope_scaling is not set in the recipe" in found[0]
    assert "rope_scaling = { factor = 4.0" in found[1]


def test_what_follows_from_other_fields_may_be_left_out(folder: Any) -> None:
    whole = Llama3(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=16, hidden_dim=48, vocab_size=64)
    assert not list(differing_fields(whole, replace(whole, n_kv_heads=None, head_dim=None)))


def test_settings_of_training_are_no_difference() -> None:
    moe = MoE(num_experts=4, hidden_dim=16, load_balance_coeff=1e-3)
    assert not list(differing_fields(moe, replace(moe, load_balance_coeff=None, group_top_k=1)))
    assert [d.key for d in differing_fields(moe, replace(moe, top_k=2))] == ["top_k"]


@pytest.mark.parametrize(
    "change",
    [
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"embedding_multiplier": 12.0},
        {"residual_multiplier": 0.22},
        {"logits_scaling": 8.0},
        {"attention_multiplier": 1.0},
        {"partial_rotary_factor": 0.5},
        {"clip_qkv": 8.0},
        {"use_sliding_window": True},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "attention_factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
        {"is_causal": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_key_that_changes_the_model_is_refused_by_name(folder: Any, change: dict[str, Any]) -> None:
    [(key, value)] = change.items()
    names = ["rope_type = 'dynamic'", "attention_factor", "rope_theta"] if key.startswith("rope") else [key]
    with pytest.raises(EnvironmentProblem) as caught:
        complaint(MODEL, folder({**QWEN, key: value}), ())
    assert "which the model qwen3 does not support" in caught.value.message
    assert any(name in caught.value.message for name in names)


@pytest.mark.parametrize(
    "change", [{"embedding_multiplier": 1.0}, {"attn_logit_softcapping": None}, {"mlp_bias": False}]
)
def test_a_key_at_its_neutral_value_changes_nothing(folder: Any, change: dict[str, Any]) -> None:
    assert complaint(MODEL, folder({**QWEN, **change}), ()) is None


def test_weights_of_another_family_are_named(folder: Any) -> None:
    found = complaint(MODEL, folder(LLAMA), ())
    assert found is not None
    assert "holds a 'llama' model, but this recipe trains a 'qwen3' or " in found[0]


def test_a_folder_that_sees_images_too_holds_the_text_model(folder: Any) -> None:
    from titancli.models.blocks.hf import DecoderHF

    config = bind(Llama4, Llama4.flavors["debugmodel_irope"], current())
    there = {
        "model_type": "llama4",
        "text_config": DecoderHF(config).config_json(),
        "vision_config": {"a": 1},
    }
    assert complaint(config, folder(there), ()) is None
    found = complaint(replace(config, qk_norm=not config.qk_norm), folder(there), ())
    assert found is not None
    assert "qk_norm" in found[0]


def test_any_model_of_transformers_is_compared_by_its_keys(folder: Any) -> None:
    own = HFCausalLM(config={**LLAMA, "rms_norm_eps": 1e-6})
    assert complaint(own, folder({**LLAMA, "use_cache": False, "rms_norm_eps": 1e-6}), ()) is None
    found = complaint(own, folder({**LLAMA, "rope_theta": 10.0}), ())
    assert found is not None
    assert "config." in found[0]


@pytest.mark.parametrize("family", [Llama3, Qwen3, DeepSeekV3, Llama4, GptOss])
def test_what_is_exported_is_read_as_the_same_model(folder: Any, family: Any) -> None:
    from titancli.registry.component import component_info, load_target

    for name, keys in family.flavors.items():
        config = bind(family, keys, current())
        form = load_target(component_info(family).hf)(config)
        assert complaint(config, folder(form.config_json()), ()) is None, name


def test_a_titan_checkpoint_of_another_model_is_told_too(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("")
    lock = (
        'recipe = 1\n[model]\ntype = "titancli/qwen3"\ndim = 32\nn_layers = 2\nn_heads = 4\nhead_dim = 16\n'
    )
    lock += "n_kv_heads = 2\nhidden_dim = 48\nvocab_size = 64\nmax_seq_len = 64\nrope_theta = 10000.0\n"
    (tmp_path / "recipe.lock.toml").write_text(lock)
    found = complaint(MODEL, tmp_path, ())
    assert found is not None
    assert "rope_theta is 1000000.0 in the recipe and 10000.0 there" in found[0]
    assert complaint(replace(MODEL, rope_theta=10000.0), tmp_path, ()) is None


RECIPE = """
recipe = 1
name = "other"
weights = "{folder}"
[model]
type = "qwen3"
flavor = "debugmodel"
[tokenizer]
type = "byte"
[dataset]
type = "python_stdlib"
[training]
steps = 10
seq_len = 64
[lr_scheduler]
warmup_steps = 0
"""


def test_validate_compares_them_without_torch(folder: Any, tmp_path: Path) -> None:
    (tmp_path / "exp.toml").write_text(RECIPE.format(folder=folder(QWEN)))
    code = "import sys; from titancli.cli import main; code = main(sys.argv[1:])"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit(code)", "validate", str(tmp_path / "exp.toml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr
    assert "dim is 256 in the recipe and 32 there" in done.stderr
