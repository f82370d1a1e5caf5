"""transformers' DeepseekV2ForCausalLM and DeepseekV3ForCausalLM, as the model deepseek_v3. Torch-free."""

from __future__ import annotations

from typing import Any

from titancli.models.config_json import ConfigJSON, reads, refuse_others, rope_of, theta_of

LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Named alike here and there."""


@reads(
    "deepseek_v3",
    # Sizes that follow from others, and the layers that predict further tokens, which are not read.
    ignoring=("head_dim", "qk_head_dim", "num_nextn_predict_layers", "topk_group", "n_group"),
)
def read(config_json: ConfigJSON) -> dict[str, Any]:
    """The keys of `[model]` for a `config.json`.

    Raises:
        EnvironmentProblem: biases, fewer heads of keys than of queries, another RoPE or another routing than
            DeepSeek's, quantised weights, or anything else that the model does not have.
    """
    is_v3 = config_json["model_type"] == "deepseek_v3"
    _refuse(config_json, is_v3)
    keys = {
        "dim": config_json["hidden_size"],
        "n_layers": config_json["num_hidden_layers"],
        "n_dense_layers": config_json.get("first_k_dense_replace", 3 if is_v3 else 0),
        "n_heads": config_json["num_attention_heads"],
        "hidden_dim": config_json["intermediate_size"],
        **{name: config_json[name] for name in LATENT},
        "vocab_size": config_json["vocab_size"],
        "max_seq_len": config_json.get("max_position_embeddings", 4096 if is_v3 else 2048),
        "rope_theta": theta_of(config_json),
        "norm_eps": config_json.get("rms_norm_eps", 1e-6),
        "tied": bool(config_json.get("tie_word_embeddings", False)),
    }
    if (rank := config_json.get("q_lora_rank", 1536)) is not None:
        keys["q_lora_rank"] = rank
    if (yarn := _yarn(config_json)) is not None:
        keys["rope_scaling"] = yarn
    return {**keys, "moe": _routing(config_json, is_v3)}


def _refuse(config_json: ConfigJSON, is_v3: bool) -> None:
    kind, rope = rope_of(config_json)
    heads = config_json["num_attention_heads"]
    computed = {
        "rope_type": kind,
        "num_key_value_heads": config_json.get("num_key_value_heads") or heads,
        "n_shared_experts": bool(config_json.get("n_shared_experts", True)),
    }
    expected = {
        "attention_bias": False,
        "hidden_act": "silu",
        "num_key_value_heads": heads,
        "moe_layer_freq": 1,
        "n_shared_experts": True,
        "scoring_func": "sigmoid" if is_v3 else "softmax",
    }
    expected |= {"topk_method": "noaux_tc", "rope_interleave": True} if is_v3 else {"norm_topk_prob": False}
    if kind == "yarn":
        # mscale_all_dim turns into the scale of attention, and their ratio into that of cosine and sine.
        computed |= {"mscale": rope.get("mscale"), "attention_factor": rope.get("attention_factor") or 1.0}
        expected |= {"mscale": rope.get("mscale_all_dim", 0), "attention_factor": 1.0}
    else:
        expected["rope_type"] = "default"
    method = config_json.get("topk_method")
    if not is_v3 and method not in (None, "greedy", "group_limited_greedy"):
        config_json.refused.append(f"topk_method = {method!r}")
    refuse_others(config_json, expected, computed)


def _yarn(config_json: ConfigJSON) -> dict[str, Any] | None:
    kind, rope = rope_of(config_json)
    if kind != "yarn":
        return None
    return {
        "factor": float(rope["factor"]),
        "original_max_position": int(rope["original_max_position_embeddings"]),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "truncate": bool(rope.get("truncate", True)),
        "mscale": float(rope["mscale"]),
    }


def _routing(config_json: ConfigJSON, is_v3: bool) -> dict[str, Any]:
    groups = config_json.get("n_group", 8 if is_v3 else None) or 1
    keys = {
        "num_experts": config_json["n_routed_experts"],
        "num_shared_experts": config_json["n_shared_experts"],
        "top_k": config_json["num_experts_per_tok"],
        "hidden_dim": config_json["moe_intermediate_size"],
        "score_func": "sigmoid" if is_v3 else "softmax",
        "route_norm": is_v3 and bool(config_json.get("norm_topk_prob", True)),
        "route_scale": float(config_json.get("routed_scaling_factor", 2.5 if is_v3 else 1.0)),
        "score_before_experts": False,
        "load_balance_coeff": 1e-3,
    }
    method = config_json.get("topk_method")
    if groups > 1 and (is_v3 or method == "group_limited_greedy"):
        keys |= {"num_expert_groups": groups, "num_limited_groups": config_json["topk_group"]}
        keys["group_top_k"] = 2 if is_v3 else 1
    return keys
