"""transformers' Qwen3ForCausalLM and Qwen3MoeForCausalLM, as the model qwen3. Torch-free."""

from __future__ import annotations

from typing import Any

from titancli.models.config_json import ConfigJSON, reads, refuse_others, rope_of, theta_of


@reads(
    "qwen3",
    # The first two say nothing where no layer slides; the others stand beside their own other name.
    ignoring=("sliding_window", "max_window_layers", "num_local_experts", "intermediate_size"),
)
def read(config_json: ConfigJSON) -> dict[str, Any]:
    """The keys of `[model]` for a `config.json`.

    Raises:
        EnvironmentProblem: biases, sliding windows, dense layers between those of experts, a stretched RoPE,
            quantised weights, or anything else that the model does not have.
    """
    layers = config_json["num_hidden_layers"]
    whole = ["full_attention"] * layers
    expected = {
        "attention_bias": False,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_type": "default",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "layer_types": whole,
    }
    computed = {
        "rope_type": rope_of(config_json)[0],
        "mlp_only_layers": config_json.get("mlp_only_layers") or [],
        "layer_types": config_json.get("layer_types") or whole,
    }
    refuse_others(config_json, expected, computed)
    dense = config_json["model_type"] == "qwen3"
    heads = config_json["num_attention_heads"]
    keys = {
        "dim": config_json["hidden_size"],
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": config_json.get("num_key_value_heads") or heads,
        "head_dim": config_json.get("head_dim") or (128 if dense else config_json["hidden_size"] // heads),
        "vocab_size": config_json["vocab_size"],
        "max_seq_len": config_json.get("max_position_embeddings", 32768),
        "rope_theta": theta_of(config_json),
        "norm_eps": config_json.get("rms_norm_eps", 1e-6),
        "tied": bool(config_json.get("tie_word_embeddings", False)),
    }
    if dense:
        return {**keys, "hidden_dim": config_json["intermediate_size"]}
    routing = {
        "num_experts": config_json.get("num_experts") or config_json["num_local_experts"],
        "top_k": config_json["num_experts_per_tok"],
        "hidden_dim": config_json["moe_intermediate_size"],
        "route_norm": bool(config_json.get("norm_topk_prob", False)),
    }
    return {**keys, "moe": routing}
