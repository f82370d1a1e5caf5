"""Small models of transformers, as what stands in their config.json."""

from __future__ import annotations

from typing import Any

from titan_transformers import HFCausalLM

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
# one matrix for q, k and v, and another for gate and up, whose outputs ranks gather
PHI3: dict[str, Any] = {
    **LLAMA,
    "model_type": "phi3",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# a second embedding, of which each layer gets a part
GEMMA4: dict[str, Any] = {
    **LLAMA,
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "pad_token_id": None,
}
# a router that computes with the weight of a Linear itself, two attentions in a block
LONGCAT: dict[str, Any] = dict(
    model_type="longcat_flash",
    hidden_size=32,
    num_layers=1,
    num_attention_heads=2,
    ffn_hidden_size=48,
    expert_ffn_hidden_size=16,
    n_routed_experts=4,
    zero_expert_num=2,
    moe_topk=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    head_dim=8,
    vocab_size=64,
    max_position_embeddings=128,
)
# a parameter of the model that is in no block, and blocks that run several times
HRM: dict[str, Any] = dict(
    model_type="hrm_text",
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_layers_per_stack=1,
    H_cycles=2,
    L_cycles=2,
    vocab_size=64,
    max_position_embeddings=128,
    pad_token_id=None,
)
# attention that chooses its keys, which SDPA would not
SPARSE: dict[str, Any] = {
    **LLAMA,
    "model_type": "minimax_m3_vl_text",
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "dense_intermediate_size": 32,
    "shared_intermediate_size": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(name: str, **changes: Any) -> HFCausalLM:
    more = {"phi3": PHI3, "longcat_flash": LONGCAT, "hrm_text": HRM, "gemma4": GEMMA4}
    values = more.get(name) or CONFIGS[name]
    return HFCausalLM(config={**values, **changes})
