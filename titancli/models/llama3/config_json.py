"""transformers' LlamaForCausalLM, as the model llama3. Torch-free."""

from __future__ import annotations

from typing import Any

from titancli.models.config_json import (
    ConfigJSON,
    llama3_rope_keys,
    reads,
    refuse_others,
    rope_of,
    theta_of,
)


@reads("llama3")
def read(config_json: ConfigJSON) -> dict[str, Any]:
    """The keys of `[model]` for a `config.json`.

    Raises:
        EnvironmentProblem: biases, another activation, another RoPE than Llama 3's, quantised weights, or
            anything else that the model does not have.
    """
    kind, _ = rope_of(config_json)
    expected = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_type": "default"}
    refuse_others(config_json, expected, {"rope_type": "default" if kind == "llama3" else kind})
    dim, heads = config_json["hidden_size"], config_json["num_attention_heads"]
    return {
        "dim": dim,
        "n_layers": config_json["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": config_json.get("num_key_value_heads") or heads,
        "head_dim": config_json.get("head_dim") or dim // heads,
        "hidden_dim": config_json["intermediate_size"],
        "vocab_size": config_json["vocab_size"],
        "max_seq_len": config_json.get("max_position_embeddings", 2048),
        "rope_theta": theta_of(config_json),
        "norm_eps": config_json.get("rms_norm_eps", 1e-6),
        "tied": bool(config_json.get("tie_word_embeddings", False)),
        **llama3_rope_keys(config_json),
    }
