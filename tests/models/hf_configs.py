"""Small models of transformers, as what stands in their config.json."""

from __future__ import annotations

from typing import Any

from titancli.models import HFCausalLM

LLAMA: dict[str, Any] = dict(
    model_type="llama",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=128,
)
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True, "pad_token_id": 3},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 8},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    # norms that begin at 0, a scaled embedding, two rotary embeddings, layers of two kinds
    "gemma3": {
        **LLAMA,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": SLIDING,
    },
    # learnt positions, Conv1D, biases
    "gpt2": dict(
        model_type="gpt2",
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=64,
        n_positions=128,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
    # one matrix for q, k and v, norms with a bias
    "gpt_neox": dict(
        model_type="gpt_neox",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=128,
    ),
    "experts": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


def config(name: str, **changes: Any) -> HFCausalLM:
    return HFCausalLM(config={**CONFIGS[name], **changes})
