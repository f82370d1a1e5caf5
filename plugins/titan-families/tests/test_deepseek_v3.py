"""What is DeepSeek-V2's and V3's own; what holds for every family is in `test_families.py`."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.families import DEEPSEEK
from tests.models.specs import size_of
from titan_families import DeepSeekV3
from titancli.checkpoint import export_hf, read_hf
from titancli.checkpoint.hf.detect_model import model_of
from titancli.errors import TitanError
from titancli.models.blocks.hf import DecoderHF
from titancli.models.blocks.state import named_state
from titancli.registry import current
from titancli.registry.binding import bind


def test_pairs_are_told_apart():
    """Not a permutation that is its own inverse: rows 0, 1, 2, 3, … are pairs in the files."""
    config = DEEPSEEK.variant("V2", n_heads=1, qk_nope_head_dim=2, qk_rope_head_dim=6)
    rows = torch.arange(8.0)[:, None]
    form = DecoderHF(config)
    inside = form.from_hf("layers.0.attention.wq.weight", [rows])
    assert inside.flatten().tolist() == [0, 1, 2, 4, 6, 3, 5, 7]
    ((_, back),) = form.to_hf("layers.0.attention.wq.weight", inside)
    assert torch.equal(back, rows)


def test_the_scale_of_attention_grows_with_the_context():
    plain = (128 + 64) ** -0.5
    assert DEEPSEEK.flavor("671B").softmax_scale == pytest.approx(plain * (0.1 * math.log(40) + 1) ** 2)
    assert DEEPSEEK.flavor("16B").softmax_scale == pytest.approx(plain * (0.0707 * math.log(40) + 1) ** 2)
    assert replace(DEEPSEEK.flavor("16B"), rope_scaling=None).softmax_scale == plain
    assert DEEPSEEK.variant("V2").softmax_scale == pytest.approx(24**-0.5)


def test_a_v2_export_says_what_it_leaves_out(caplog):
    form = DecoderHF(DEEPSEEK.variant("V2"))
    with caplog.at_level(logging.WARNING):
        assert list(form.to_hf("layers.1.moe.expert_bias", torch.ones(8))) == []
    assert "a Hugging Face folder cannot hold" in caplog.text
    assert torch.equal(form.from_hf("layers.1.moe.expert_bias", []), torch.zeros(8))


def test_a_bias_keeps_its_digits_and_none_is_lost(tmp_path):
    """V3's bias is fp32 in files of bf16; a model without one reads no other than zeros."""
    ours = DEEPSEEK.model("V3")
    state = {name: tensor.detach() for name, tensor in named_state(ours)}
    export_hf(state, DecoderHF(ours.config), {}, tmp_path / "hf", dtype=torch.bfloat16)
    reader = read_hf(tmp_path / "hf", DecoderHF(ours.config))
    name = "layers.2.moe.expert_bias"
    assert torch.equal(reader.parameter(name), state[name])
    assert reader.parameter("output.weight").dtype == torch.bfloat16
    without = DecoderHF(replace(ours.config, moe=replace(ours.config.moe, load_balance_coeff=None)))
    with pytest.raises(TitanError, match=r"layers.2.mlp.gate.e_score_correction_bias is not zero"):
        read_hf(tmp_path / "hf", without).parameter("layers.2.moe.router.gate.weight")


def test_a_folder_with_a_bias_is_finetuned_with_the_bias_as_it_is():
    """As transformers does it; V2's folders have none."""
    for variant, frozen in {"V3": True, "V2": None}.items():
        form = DecoderHF(DEEPSEEK.variant(variant))
        assert DeepSeekV3.from_config_json(form.config_json())["moe"].get("freeze_expert_bias") is frozen


def test_layers_that_predict_further_tokens_are_left_unread_in_words(caplog):
    form = DecoderHF(DEEPSEEK.variant("V3"))
    with caplog.at_level(logging.WARNING):
        assert form.ignored("model.layers.3.eh_proj.weight")
        assert form.ignored("model.layers.3.mlp.experts.0.up_proj.weight")
        assert not form.ignored("model.layers.2.eh_proj.weight")
    assert [record.getMessage() for record in caplog.records] == [
        "the layers beyond the 3 of the model, which predict further tokens, are left out: "
        "model.n_mtp_layers is 0"
    ]


def test_a_released_config_is_that_of_its_flavor():
    """DeepSeek-V2-Lite's, the keys that say something of the model."""
    released = {
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    }
    assert bind(DeepSeekV3, DeepSeekV3.from_config_json(released), current()) == DEEPSEEK.flavor("16B")


KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}


@pytest.mark.parametrize("within", [None, "kimi_k25"])
def test_kimi_k2_is_a_deepseek_v3(within: str | None) -> None:
    text = {**KIMI_K2, "num_beam_groups": 1, "num_return_sequences": 1, "top_k": 50, "typical_p": 1.0}
    there = KIMI_K2 if within is None else {"model_type": within, "vision_config": {}, "text_config": text}
    config = bind(DeepSeekV3, DeepSeekV3.from_config_json(there), current())
    assert there["model_type"] in DeepSeekV3.model_types
    assert (config.model_type, config.rope_theta, config.moe.route_scale) == ("deepseek_v3", 50000.0, 2.827)
    assert config.moe.num_expert_groups is None
    assert size_of(config) == 1_026_408_232_448 - 60 * 384  # the release counts balancing biases


def test_a_folder_of_kimi_k2_is_read(tmp_path: Path) -> None:
    """Under its own model_type; with what sees images in it, the text model alone."""
    ours = DEEPSEEK.model("V3")
    state = {name: tensor.detach() for name, tensor in named_state(ours)}
    export_hf(state, DecoderHF(ours.config), {}, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    more = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    save_file({**more, "vision_tower.patch_embed.weight": torch.ones(2)}, tmp_path / "hf/model.safetensors")
    keys = json.loads((tmp_path / "hf" / "config.json").read_text())
    whole = {"model_type": "kimi_k25", "text_config": {**keys, "model_type": "kimi_k2"}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(whole))
    name, _, config = model_of(tmp_path / "hf", None)
    assert name == "titan-families/deepseek_v3"
    reader = read_hf(tmp_path / "hf", DecoderHF(config))
    reader.check({name: tuple(tensor.shape) for name, tensor in state.items()})
    assert all(torch.equal(reader.parameter(name), tensor) for name, tensor in state.items())


@pytest.mark.parametrize(("model_type", "instead"), [("deepseek_v32", "V3.1"), ("glm_moe_dsa", "GLM-4.5")])
def test_sparse_attention_is_refused_with_what_to_use(model_type: str, instead: str, tmp_path: Path) -> None:
    keys = {**KIMI_K2, "model_type": model_type, "index_topk": 2048, "index_n_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(TitanError, match="index_topk = 2048 keys for each token") as caught:
        model_of(tmp_path, None)
    assert instead in str(caught.value.hint)


@pytest.mark.parametrize(("name", "mscale"), [("16B", 0.707), ("236B", 0.707), ("671B", 1.0)])
def test_the_flavors_are_what_was_released(name: str, mscale: float) -> None:
    config = DEEPSEEK.flavor(name)
    assert (config.norm_eps, config.max_seq_len, config.rope_scaling.mscale) == (1e-6, 163840, mscale)
