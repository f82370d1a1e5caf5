"""transformers' Llama4ForCausalLM, and the text model of Llama4ForConditionalGeneration. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.models.config_json import (
    ConfigJSON,
    llama3_rope_keys,
    reads,
    refuse_others,
    rope_of,
    theta_of,
)


def read(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `[model]` for a `config.json`; of a model that sees images too, for its text model.

    Raises:
        EnvironmentProblem: biases, another activation or RoPE, layers that do not alternate regularly,
            quantised weights, or anything else that the model does not have.
    """
    quantised = config_json.get("quantization_config")
    return _text({"quantization_config": quantised, **config_json.get("text_config", config_json)})


# no_rope_layer_interval counts where no_rope_layers does not say it, and the widths where there are such
# layers.
@reads("llama4", ignoring=("no_rope_layer_interval", "intermediate_size_mlp", "floor_scale", "attn_scale"))
def _text(text: ConfigJSON) -> dict[str, Any]:
    kind, _ = rope_of(text)
    expected = {"attention_bias": False, "hidden_act": "silu", "rope_type": "default"}
    refuse_others(text, expected, {"rope_type": "default" if kind == "llama3" else kind})
    layers = text["num_hidden_layers"]
    step = text.get("interleave_moe_layer_step", 1)
    experts = text.get("moe_layers")
    every = _every("moe_layers", range(step - 1, layers, step) if experts is None else experts, layers)
    if every is None:
        raise EnvironmentProblem("config.json has no layers with experts, but every Llama 4 model has some")
    interval = text.get("no_rope_layer_interval", 4)
    ropes = text.get("no_rope_layers") or [(number + 1) % interval for number in range(layers)]
    nope = _every("no_rope_layers", [number for number, rope in enumerate(ropes) if not rope], layers)
    keys = {
        "dim": text["hidden_size"],
        "n_layers": layers,
        "n_heads": text["num_attention_heads"],
        "n_kv_heads": text.get("num_key_value_heads") or text["num_attention_heads"],
        "head_dim": text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        "vocab_size": text["vocab_size"],
        "max_seq_len": text.get("max_position_embeddings", 131072),
        "rope_theta": theta_of(text, 500000.0),
        "norm_eps": text.get("rms_norm_eps", 1e-5),
        "tied": bool(text.get("tie_word_embeddings", False)),
        "qk_norm": bool(text.get("use_qk_norm", True)),
        "interleave_moe_layer_step": every,
        **llama3_rope_keys(text),
        **_chunks(text, ropes),
    }
    if every > 1:
        keys["hidden_dim"] = text.get("intermediate_size_mlp", 16384)
    temperature = text.get("attn_temperature_tuning", True)
    if nope is not None:
        keys["every_n_layers_nope"] = nope
        if temperature:
            steps = {"floor_scale": text.get("floor_scale", 8192)}
            keys["attn_temperature"] = {**steps, "attn_scale": text.get("attn_scale", 0.1)}
    routing = {
        "num_experts": text["num_local_experts"],
        "top_k": text.get("num_experts_per_tok", 1),
        "hidden_dim": text["intermediate_size"],
    }
    return {**keys, "moe": routing}


def _every(key: str, found: Sequence[int], layers: int) -> int | None:
    """Of how many layers each time the last is among those found; None: none is found at all."""
    if not found:
        return None
    step = min(found) + 1
    if sorted(found) != list(range(step - 1, layers, step)):
        raise EnvironmentProblem(
            f"config.json has {key} at irregular places ({list(found)}), which the model llama4 does "
            f"not support"
        )
    return step


def _chunks(text: ConfigJSON, ropes: Sequence[int]) -> dict[str, int]:
    """The key `fixed_attn_block_size`, if layers with RoPE see chunks."""
    local = ["chunked_attention" if rope else "full_attention" for rope in ropes]
    types = text.get("layer_types") or local
    if text.get("attention_chunk_size") is None or "chunked_attention" not in types:
        return {}
    if types != local:
        raise EnvironmentProblem(
            f"config.json has layer_types = {types}: the model llama4 has chunked attention in all "
            f"layers with RoPE and in no others"
        )
    return {"fixed_attn_block_size": text["attention_chunk_size"]}
