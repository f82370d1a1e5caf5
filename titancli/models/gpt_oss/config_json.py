"""transformers' GptOssForCausalLM, as the model gpt_oss. Torch-free."""

from __future__ import annotations

from typing import Any

from titancli.models.config_json import ConfigJSON, reads, refuse_others, rope_of, theta_of

_SHARPNESS = ("attention_factor", "mscale", "mscale_all_dim")
"""Keys by which a config.json changes what cos and sin are multiplied by."""


# Older names of what stands beside them, and the context before YaRN, which is among YaRN's own keys.
@reads("gpt_oss", ignoring=("num_experts", "experts_per_token", "initial_context_length"))
def read(config_json: ConfigJSON) -> dict[str, Any]:
    """The keys of `[model]` for a `config.json`.

    Raises:
        EnvironmentProblem: attention without biases, other layers that slide than every other one, another
            RoPE than YaRN with its usual sharpness, quantised weights (MXFP4, as released), or anything else
            that the model does not have.
    """
    layers = config_json["num_hidden_layers"]
    kind, rope = rope_of(config_json)
    computed: dict[str, Any] = {"rope_type": "default" if kind == "yarn" else kind}
    computed |= {key: rope[key] for key in _SHARPNESS if rope.get(key) is not None}
    computed["layer_types"] = config_json.get("layer_types") or layer_types(layers)
    expected = {
        "attention_bias": True,
        "hidden_act": "silu",
        "layer_types": layer_types(layers),
        "rope_type": "default",
        **dict.fromkeys(_SHARPNESS),
    }
    refuse_others(config_json, expected, computed)
    keys = {
        "dim": config_json["hidden_size"],
        "n_layers": layers,
        "n_heads": config_json["num_attention_heads"],
        "n_kv_heads": config_json.get("num_key_value_heads") or config_json["num_attention_heads"],
        "head_dim": config_json.get("head_dim") or 64,
        "vocab_size": config_json["vocab_size"],
        "max_seq_len": config_json.get("max_position_embeddings", 131072),
        "rope_theta": theta_of(config_json, 150000.0),
        "norm_eps": config_json.get("rms_norm_eps", 1e-5),
        "tied": bool(config_json.get("tie_word_embeddings", False)),
        "sliding_window": config_json.get("sliding_window", 128),
        "swiglu_alpha": config_json.get("swiglu_alpha", 1.702),
        "swiglu_limit": config_json.get("swiglu_limit", 7.0),
    }
    routing = {
        "num_experts": config_json.get("num_local_experts") or config_json["num_experts"],
        "top_k": config_json.get("num_experts_per_tok") or config_json["experts_per_token"],
        "hidden_dim": config_json["intermediate_size"],
    }
    keys["moe"] = routing
    if kind == "yarn":
        keys["yarn"] = _yarn(rope, keys["max_seq_len"])
    elif rope:
        keys["yarn"] = None
    return keys


def layer_types(layers: int) -> list[str]:
    """What transformers calls the layers, whose first, third, … slides."""
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


def _yarn(rope: ConfigJSON, max_seq_len: int) -> dict[str, Any]:
    return {
        "factor": float(rope["factor"]),
        "beta_fast": float(rope.get("beta_fast") or 32.0),
        "beta_slow": float(rope.get("beta_slow") or 1.0),
        "truncate": bool(rope.get("truncate", True)),
        "original_max_position": int(rope.get("original_max_position_embeddings") or max_seq_len),
    }
