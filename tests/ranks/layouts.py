"""The layouts that are compared with one rank, each under its name in the table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.engine.cases import VOCABULARY, Layout
from tests.models import hf_configs
from tests.models.by_spec import Gemma2, Phi, StarCoder2
from titan_families import DeepSeekV3, Glm4Moe, Granite, Llama4, Mixtral, Olmo3
from titan_families.deepseek_v3 import LatentYarn
from titan_float8 import Float8Linear
from titan_qwen3_next import Qwen3Next
from titancli.layout.stages import SCHEDULES
from titancli.losses import CrossEntropyFull
from titancli.models import Gemma3, GptOss, Qwen3
from titancli.models.sections import AttnTemperature, LinearScaling, MoE, Yarn

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    ranks: int
    layout: Layout
    optimizer: str = "sgd"
    tolerance: float = TOLERANCE


def case(ranks: int, optimizer: str = "sgd", tolerance: float = TOLERANCE, **layout: Any) -> Case:
    """Degrees by their own names (`tp=2`), everything else as in `Layout`."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    mesh = {name: layout.pop(name) for name in names if name in layout}
    if "pp" not in mesh and "config" not in layout:  # two layers show all that four do
        layout["model"] = {"n_layers": 2, **layout.get("model", {})}
    return Case(ranks, Layout(mesh=mesh, **layout), optimizer, tolerance)


FULL_AC = {"mode": "full"}
BY_OP = {"mode": "selective", "selective_ac_option": "op"}
SECOND = {"mode": "selective", "selective_ac_option": "2"}
MANY_HEADS = {"n_kv_heads": 4}

DATA = {
    "accumulation": case(1, micro_batches=4),
    "DDP2": case(2, dp_replicate=2),
    "FSDP2": case(2, "adam", dp_shard=2),
    "FSDP4": case(4, dp_shard=4),
    "HSDP2x2": case(4, "adam", dp_replicate=2, dp_shard=2),
    "FSDP2, accumulation": case(2, dp_shard=2, micro_batches=2),
    "FSDP2, accumulation unsharded": case(2, dp_shard=2, micro_batches=2, accumulate="unsharded"),
    "HSDP2x2, accumulation": case(4, dp_replicate=2, dp_shard=2, micro_batches=2),
    "HSDP2x2, accumulation unsharded": case(
        4, dp_replicate=2, dp_shard=2, micro_batches=2, accumulate="unsharded"
    ),
    "FSDP2, always reshard": case(2, dp_shard=2, reshard="always"),
    "FSDP2, never reshard": case(2, dp_shard=2, reshard="never"),
    "FSDP2, AC full": case(2, dp_shard=2, activation_checkpoint=FULL_AC),
    "FSDP2, AC by op": case(2, dp_shard=2, activation_checkpoint=BY_OP),
    "FSDP2, AC every 2nd": case(2, dp_shard=2, activation_checkpoint=SECOND),
    "FSDP2, compiled": case(2, "adam", dp_shard=2, compile="aot_eager"),
    "FSDP2, compiled, AC by op": case(2, dp_shard=2, compile="aot_eager", activation_checkpoint=BY_OP),
    "FSDP2, full logits": case(2, dp_shard=2, loss=CrossEntropyFull()),
    "FSDP2, documents": case(2, dp_shard=2, documents=True),
    "FSDP2, tied": case(2, "adam", dp_shard=2, tied=True),
    "FSDP2, bf16": case(2, dp_shard=2, dtype="bfloat16", tolerance=0.05),
}
TENSOR = {
    "TP2": case(2, "adam", tp=2),
    "TP4": case(4, tp=4, model=MANY_HEADS),
    "FSDP2xTP2": case(4, "adam", dp_shard=2, tp=2),
    "DDP2xTP2": case(4, dp_replicate=2, tp=2),
    "TP2, accumulation": case(2, tp=2, micro_batches=2),
    "FSDP2xTP2, accumulation": case(4, dp_shard=2, tp=2, micro_batches=2),
    "TP2, tied": case(2, tp=2, tied=True),
    "FSDP2xTP2, tied": case(4, dp_shard=2, tp=2, tied=True),
    "TP2, AC by op": case(2, tp=2, activation_checkpoint=BY_OP),
    "TP2, documents": case(2, tp=2, documents=True),
    "TP2, full logits": case(2, tp=2, loss=CrossEntropyFull()),
    "TP2, compiled": case(2, tp=2, compile="aot_eager"),
    "FSDP2xTP2, compiled, AC full": case(
        4, dp_shard=2, tp=2, compile="aot_eager", activation_checkpoint=FULL_AC
    ),
    "TP2, bf16": case(2, tp=2, dtype="bfloat16", tolerance=0.05),
}
CONTEXT = {
    "CP2, allgather": case(2, "adam", cp=2),
    "CP2, ulysses": case(2, "adam", cp=2, context_parallel="ulysses"),
    "CP2, ring": case(2, cp=2, context_parallel="ring"),
    "CP4, allgather": case(4, cp=4),
    "CP2xFSDP2, allgather": case(4, "adam", cp=2, dp_shard=2),
    "CP2xFSDP2, ulysses": case(4, cp=2, dp_shard=2, context_parallel="ulysses"),
    "CP2xFSDP2, accumulation": case(4, cp=2, dp_shard=2, micro_batches=2),
    "CP2xTP2, allgather": case(4, cp=2, tp=2),
    "CP2xTP2, compiled, AC by op": case(4, cp=2, tp=2, compile="aot_eager", activation_checkpoint=BY_OP),
    "CP2, documents": case(2, cp=2, documents=True),
    "CP2, full logits": case(2, cp=2, loss=CrossEntropyFull()),
    "CP2, bf16": case(2, cp=2, dtype="bfloat16", tolerance=0.05),
}
MORE_LAYERS = {"n_layers": 8}
PIPELINE = {
    **{f"PP2, {name}": case(2, "adam", pp=2, pipeline={"schedule": name}) for name in SCHEDULES},
    **{f"PP2xFSDP2, {name}": case(4, pp=2, dp_shard=2, pipeline={"schedule": name}) for name in SCHEDULES},
    "PP4": case(4, "adam", pp=4),
    "PP4, Interleaved1F1B": case(4, pp=4, model=MORE_LAYERS, pipeline={"schedule": "Interleaved1F1B"}),
    "PP4, DualPipeV": case(4, pp=4, model=MORE_LAYERS, pipeline={"schedule": "DualPipeV"}),
    "PP2xDDP2": case(4, pp=2, dp_replicate=2),
    "PP2xDDP2, ZBVZeroBubble": case(4, pp=2, dp_replicate=2, pipeline={"schedule": "ZBVZeroBubble"}),
    "PP2xTP2": case(4, "adam", pp=2, tp=2),
    "PP2xTP2, ZBVZeroBubble": case(4, pp=2, tp=2, pipeline={"schedule": "ZBVZeroBubble"}),
    "PP2xCP2": case(4, pp=2, cp=2),
    "PP2xCP2, InterleavedZeroBubble": case(
        4, pp=2, cp=2, documents=True, pipeline={"schedule": "InterleavedZeroBubble"}
    ),
    "PP2xFSDP2, accumulation": case(4, pp=2, dp_shard=2, micro_batches=2),
    "PP2xFSDP2, always reshard": case(4, pp=2, dp_shard=2, reshard="always"),
    "PP2, two rows at a time, documents": case(2, pp=2, documents=True, pipeline={"microbatch_size": 2}),
    "PP2, AC by op": case(2, pp=2, activation_checkpoint=BY_OP),
    "PP2xFSDP2, compiled, AC full": case(
        4, pp=2, dp_shard=2, compile="aot_eager", activation_checkpoint=FULL_AC
    ),
    "PP2, bf16": case(2, pp=2, dtype="bfloat16", tolerance=0.05),
    "PP2xFSDP2, DualPipeV, bf16": case(
        4, pp=2, dp_shard=2, dtype="bfloat16", tolerance=0.05, pipeline={"schedule": "DualPipeV"}
    ),
}
# Sizes whose parts are multiples of 16 under TP, so that the same layers are converted.
WIDE = {"dim": 64, "hidden_dim": 128}
FLOAT8 = {
    f"{name}, float8 {recipe}": case(
        4,
        **mesh,
        model=WIDE,
        # Sums in another order may round to another float8 number here and there.
        tolerance=2e-2,
        converters=[Float8Linear(recipe=recipe, skip=["output"])],
    )
    for name, mesh in {"FSDP4": {"dp_shard": 4}, "FSDP2xTP2": {"dp_shard": 2, "tp": 2}}.items()
    for recipe in ("tensorwise", "rowwise")
}

SIZES: dict[str, Any] = dict(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=VOCABULARY, rope_theta=10000.0
)
ROUTING: dict[str, Any] = dict(score_func="softmax", route_norm=True, score_before_experts=False)
EIGHT = Qwen3(**SIZES, moe=MoE(num_experts=8, top_k=3, hidden_dim=16, load_balance_coeff=1e-2, **ROUTING))
DEEP = replace(EIGHT, n_layers=4)
TWO = Qwen3(**SIZES, moe=MoE(num_experts=2, top_k=1, hidden_dim=16, score_func="softmax"))
SHARED = Qwen3(**SIZES, moe=MoE(num_experts=4, top_k=1, hidden_dim=16, num_shared_experts=1, gate_bias=True))
EXPERTS = {
    "experts, FSDP2": case(2, config=EIGHT, dp_shard=2),
    "EP2": case(2, config=EIGHT, dp_shard=2, ep=2),
    "EP2, accumulation": case(2, config=EIGHT, dp_shard=2, ep=2, micro_batches=2),
    "EP2, accumulation unsharded": case(
        2, config=EIGHT, dp_shard=2, ep=2, micro_batches=2, accumulate="unsharded"
    ),
    "EP4": case(4, config=EIGHT, dp_shard=4, ep=4),
    "EP2xFSDP2": case(4, config=EIGHT, dp_shard=4, ep=2),
    "EP2xDDP2": case(4, config=EIGHT, dp_replicate=2, dp_shard=2, ep=2),
    "experts, TP2": case(2, config=EIGHT, tp=2),
    "EP2 of TP2": case(2, config=EIGHT, tp=2, ep=2),
    "EP2xTP2": case(4, config=EIGHT, dp_shard=2, tp=2, ep=2),
    "EP2 of CP2xTP2": case(4, config=EIGHT, cp=2, tp=2, ep=2, context_parallel="ring"),
    "EP2 of FSDP2xCP2": case(4, config=EIGHT, dp_shard=2, cp=2, ep=2, context_parallel="ulysses"),
    "EP4 of FSDP2xTP2": case(4, config=EIGHT, dp_shard=2, tp=2, ep=4),
    "EP2 of CP2": case(2, config=EIGHT, cp=2, ep=2),
    "experts, FSDP4, two a rank": case(4, config=EIGHT, dp_shard=4),
    "EP2xFSDP2, hidden cut": case(4, config=TWO, dp_shard=4, ep=2),
    "shared, EP2xTP2": case(4, config=SHARED, dp_shard=2, tp=2, ep=2),
    "PP2xEP2": case(4, config=DEEP, pp=2, dp_shard=2, ep=2),
    "PP2xEP2, backward in two": case(
        4, config=DEEP, pp=2, dp_shard=2, ep=2, pipeline={"schedule": "ZBVZeroBubble"}
    ),
    "EP2, AC full": case(2, config=EIGHT, dp_shard=2, ep=2, activation_checkpoint=FULL_AC),
    "EP2, AC by op": case(2, config=EIGHT, dp_shard=2, ep=2, activation_checkpoint=BY_OP),
    "EP2, compiled": case(2, config=EIGHT, dp_shard=2, ep=2, compile="aot_eager"),
    "EP2, compiled, AC by op": case(
        2, config=EIGHT, dp_shard=2, ep=2, compile="aot_eager", activation_checkpoint=BY_OP
    ),
    "EP2xTP2, compiled, AC full": case(
        4, config=EIGHT, dp_shard=2, tp=2, ep=2, compile="aot_eager", activation_checkpoint=FULL_AC
    ),
    "shared, EP2xTP2, compiled, AC by op": case(
        4, config=SHARED, dp_shard=2, tp=2, ep=2, compile="aot_eager", activation_checkpoint=BY_OP
    ),
}
GPT_OSS = GptOss(
    **SIZES,
    yarn=Yarn(factor=4.0, original_max_position=8, truncate=False),
    sliding_window=4,
    moe=MoE(num_experts=4, top_k=2, hidden_dim=16, gate_bias=True, load_balance_coeff=1e-2, **ROUTING),
)
SINKS = {
    "gpt_oss, FSDP2": case(2, config=GPT_OSS, dp_shard=2),
    "gpt_oss, EP2xTP2": case(4, config=GPT_OSS, dp_shard=2, tp=2, ep=2),
    "gpt_oss, EP2xFSDP4": case(4, config=GPT_OSS, dp_shard=4, ep=2),
    "gpt_oss, PP2xEP2": case(4, config=GPT_OSS, pp=2, dp_shard=2, ep=2),
    "gpt_oss, CP2xTP2, documents": case(4, config=GPT_OSS, cp=2, tp=2, documents=True),
    "gpt_oss, CP2, ulysses": case(2, config=GPT_OSS, cp=2, context_parallel="ulysses"),
    "gpt_oss, EP2, AC by op": case(2, config=GPT_OSS, dp_shard=2, ep=2, activation_checkpoint=BY_OP),
    "gpt_oss, CP2, allgather": case(2, config=GPT_OSS, cp=2),
    "gpt_oss, TP2, compiled": case(2, config=GPT_OSS, tp=2, compile="aot_eager"),
    "gpt_oss, EP2xTP2, compiled, AC by op": case(
        4, config=GPT_OSS, dp_shard=2, tp=2, ep=2, compile="aot_eager", activation_checkpoint=BY_OP
    ),
    "gpt_oss, CP2, documents, compiled, AC full": case(
        2, config=GPT_OSS, cp=2, documents=True, compile="aot_eager", activation_checkpoint=FULL_AC
    ),
}
LATENT = DeepSeekV3(
    dim=32,
    n_layers=4,
    n_heads=4,
    hidden_dim=48,
    vocab_size=VOCABULARY,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    rope_scaling=LatentYarn(factor=4.0, original_max_position=8),
    moe=MoE(
        num_experts=8,
        top_k=2,
        hidden_dim=16,
        num_shared_experts=1,
        route_norm=True,
        score_before_experts=False,
        num_expert_groups=4,
        num_limited_groups=2,
        load_balance_coeff=1e-2,
    ),
)
LATENTS = {
    "latent, FSDP2": case(2, "adam", config=LATENT, dp_shard=2),
    "latent, TP2": case(2, config=LATENT, tp=2),
    "latent, CP2, allgather": case(2, config=LATENT, cp=2),
    "latent, CP2, ulysses, documents": case(
        2, config=LATENT, cp=2, context_parallel="ulysses", documents=True
    ),
    "latent, EP2xTP2": case(4, config=LATENT, dp_shard=2, tp=2, ep=2),
    "latent, PP2xEP2": case(4, config=LATENT, pp=2, dp_shard=2, ep=2),
    "latent, EP2 of CP2xTP2, AC by op": case(4, config=LATENT, cp=2, tp=2, ep=2, activation_checkpoint=BY_OP),
    "latent, FSDP2xTP2": case(4, "adam", config=LATENT, dp_shard=2, tp=2),
    "latent, EP2 of FSDP2xCP2": case(4, config=LATENT, dp_shard=2, cp=2, ep=2),
    "latent, PP2xTP2": case(4, config=LATENT, pp=2, tp=2),
    "latent, PP2xCP2, backward in two": case(
        4, config=LATENT, pp=2, cp=2, pipeline={"schedule": "ZBVZeroBubble"}
    ),
    "latent, EP2, compiled, AC by op": case(
        2, config=LATENT, dp_shard=2, ep=2, compile="aot_eager", activation_checkpoint=BY_OP
    ),
    "latent, EP2xTP2, compiled, AC full": case(
        4, config=LATENT, dp_shard=2, tp=2, ep=2, compile="aot_eager", activation_checkpoint=FULL_AC
    ),
}
FURTHER = replace(LATENT, n_layers=2, n_mtp_layers=2)
MTP = {
    "mtp, FSDP2xTP2, documents": case(4, config=FURTHER, dp_shard=2, tp=2, documents=True),
    "mtp, EP2 of FSDP2xCP2, documents": case(4, config=FURTHER, dp_shard=2, cp=2, ep=2, documents=True),
    "mtp, EP2xTP2, AC full, tied": case(
        4, config=replace(FURTHER, tied=True), dp_shard=2, tp=2, ep=2, activation_checkpoint=FULL_AC
    ),
    "mtp, TP2, odd vocabulary": case(2, config=replace(FURTHER, vocab_size=65), tp=2, documents=True),
    "mtp, FSDP2, compiled": case(2, config=FURTHER, dp_shard=2, compile="aot_eager"),
    "mtp, EP2xTP2, compiled": case(4, config=FURTHER, dp_shard=2, tp=2, ep=2, compile="aot_eager"),
    "mtp, FSDP2, accumulation, AC by op": case(
        2, "adam", config=FURTHER, dp_shard=2, micro_batches=2, activation_checkpoint=BY_OP
    ),
}
# Chunks that no piece of a row begins or ends with.
IROPE = Llama4(
    **{**SIZES, "n_layers": 4},
    hidden_dim=48,
    interleave_moe_layer_step=2,
    every_n_layers_nope=4,
    fixed_attn_block_size=6,
    qk_norm=True,
    attn_temperature=AttnTemperature(floor_scale=4, attn_scale=0.5),
    moe=MoE(num_experts=4, top_k=1, hidden_dim=16, num_shared_experts=1, load_balance_coeff=1e-2),
)
CHUNKS = {
    "llama4, FSDP2": case(2, "adam", config=IROPE, dp_shard=2),
    "llama4, TP2": case(2, config=IROPE, tp=2),
    "llama4, EP2xTP2": case(4, config=IROPE, dp_shard=2, tp=2, ep=2),
    "llama4, CP2, allgather": case(2, config=IROPE, cp=2),
    "llama4, CP2, ulysses, documents": case(
        2, config=IROPE, cp=2, context_parallel="ulysses", documents=True
    ),
    "llama4, EP2 of FSDP2xCP2, documents": case(4, config=IROPE, dp_shard=2, cp=2, ep=2, documents=True),
    "llama4, PP2xEP2": case(4, config=IROPE, pp=2, dp_shard=2, ep=2),
    "llama4, EP2, AC by op": case(2, config=IROPE, dp_shard=2, ep=2, activation_checkpoint=BY_OP),
    "llama4, EP2xFSDP2": case(4, config=IROPE, dp_shard=4, ep=2),
    "llama4, PP2xCP2, backward in two": case(
        4, config=IROPE, pp=2, cp=2, pipeline={"schedule": "ZBVZeroBubble"}
    ),
    "llama4, CP2xTP2": case(4, config=IROPE, cp=2, tp=2),
    "llama4, EP2, compiled, AC by op": case(
        2, config=IROPE, dp_shard=2, ep=2, compile="aot_eager", activation_checkpoint=BY_OP
    ),
    "llama4, CP2xTP2, documents, compiled, AC full": case(
        4, config=IROPE, cp=2, tp=2, documents=True, compile="aot_eager", activation_checkpoint=FULL_AC
    ),
}
DELTA = Qwen3Next(
    **{**SIZES, "n_layers": 4},
    full_attention_interval=2,
    partial_rotary_factor=0.5,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
    moe=MoE(num_experts=4, top_k=2, hidden_dim=16, num_shared_experts=1, load_balance_coeff=1e-2, **ROUTING),
)
DENSE_DELTA = replace(DELTA, n_layers=2, moe=None, hidden_dim=32)
STATES = {
    "delta, CP2xTP2, documents": case(4, config=DENSE_DELTA, cp=2, tp=2, documents=True),
    "delta, PP2xEP2": case(4, config=DELTA, pp=2, dp_shard=2, ep=2),
    "delta, FSDP2": case(2, "adam", config=DENSE_DELTA, dp_shard=2),
    "delta, TP2": case(2, config=DENSE_DELTA, tp=2),
    "delta, CP2, allgather": case(2, config=DENSE_DELTA, cp=2),
    "delta, CP2, ulysses, documents": case(
        2, config=DENSE_DELTA, cp=2, context_parallel="ulysses", documents=True
    ),
    "delta, EP2xTP2": case(4, config=DELTA, dp_shard=2, tp=2, ep=2),
    "delta, EP2 of CP2xTP2, AC by op": case(
        4, config=DELTA, cp=2, tp=2, ep=2, documents=True, activation_checkpoint=BY_OP
    ),
    "delta, PP2xCP2, backward in two": case(
        4, config=DELTA, pp=2, cp=2, documents=True, pipeline={"schedule": "ZBVZeroBubble"}
    ),
    "delta, FSDP2, bf16": case(2, config=DENSE_DELTA, dp_shard=2, dtype="bfloat16", tolerance=0.05),
    "delta, FSDP2, AC full": case(2, config=DENSE_DELTA, dp_shard=2, activation_checkpoint=FULL_AC),
    "delta, EP2, compiled, AC by op": case(
        2, config=DELTA, dp_shard=2, ep=2, compile="aot_eager", activation_checkpoint=BY_OP
    ),
    "delta, CP2xTP2, documents, compiled, AC full": case(
        4, config=DELTA, cp=2, tp=2, documents=True, compile="aot_eager", activation_checkpoint=FULL_AC
    ),
}
# Of float64, gradients under TP2 are those of one rank to 1e-15; of float32, both are 1.5e-6 from these. Adam
# divides by small gradients, and makes 1.1e-5 of that: by rounding, which is why no row of OLMo 3 uses it.
OLMO3 = Olmo3(
    **{**SIZES, "n_layers": 4, "rope_theta": 500000.0},
    hidden_dim=48,
    sliding_window=4,
    rope_scaling=Yarn(factor=4.0, original_max_position=8),
)
GLM = Glm4Moe(
    **SIZES,
    hidden_dim=48,
    qk_norm=True,
    moe=MoE(num_experts=4, top_k=2, hidden_dim=16, num_shared_experts=1, score_before_experts=False),
)
MIXTRAL = Mixtral(**SIZES, sliding_window=6, moe=MoE(num_experts=4, top_k=2, hidden_dim=16, **ROUTING))
# A window, soft caps, and norms on both sides; multipliers.
GEMMA3 = Gemma3(
    **SIZES, hidden_dim=48, sliding_window=4, rope_scaling=LinearScaling(factor=4.0), logit_cap=3.0, tied=True
)
UNTIED_GEMMA3 = replace(GEMMA3, n_layers=4, tied=False)
GRANITE = Granite(
    **{**SIZES, "n_layers": 4},
    hidden_dim=48,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    attention_multiplier=0.125,
    logits_scaling=8.0,
)
SPEC_SIZES: dict[str, Any] = {**SIZES, "hidden_dim": 48}
OTHERS = {
    "starcoder2, FSDP2xTP2, tied": case(
        4, config=StarCoder2(**SPEC_SIZES, sliding_window=4, tied=True), dp_shard=2, tp=2
    ),
    "phi, TP2, documents": case(2, config=Phi(**SPEC_SIZES), tp=2, documents=True),
    "gemma2, CP2xTP2, documents": case(
        4,
        config=Gemma2(**SPEC_SIZES, sliding_window=4, attn_logit_softcapping=2.0),
        cp=2,
        tp=2,
        documents=True,
    ),
    "gemma2, CP2, allgather": case(2, config=Gemma2(**SPEC_SIZES, sliding_window=4), cp=2),
    "gemma3, TP2": case(2, config=GEMMA3, tp=2),
    "gemma3, FSDP2xTP2, documents": case(4, config=GEMMA3, dp_shard=2, tp=2, documents=True),
    "gemma3, CP2, documents": case(2, config=UNTIED_GEMMA3, cp=2, documents=True),
    "gemma3, PP2xFSDP2": case(4, config=UNTIED_GEMMA3, pp=2, dp_shard=2),
    "gemma3, TP2, compiled, AC by op": case(
        2, config=UNTIED_GEMMA3, tp=2, compile="aot_eager", activation_checkpoint=BY_OP
    ),
    "granite, FSDP2xTP2": case(4, config=GRANITE, dp_shard=2, tp=2),
    "granite, CP2xTP2, documents": case(4, config=GRANITE, cp=2, tp=2, documents=True),
    "granite, PP2, compiled": case(2, config=GRANITE, pp=2, compile="aot_eager"),
    "olmo3, TP2": case(2, config=OLMO3, tp=2),
    "olmo3, CP2xTP2, documents": case(4, config=OLMO3, cp=2, tp=2, documents=True),
    "olmo3, PP2xFSDP2": case(4, config=OLMO3, pp=2, dp_shard=2),
    "olmo3, TP2, compiled, AC by op": case(
        2, config=OLMO3, tp=2, compile="aot_eager", activation_checkpoint=BY_OP
    ),
    "glm4_moe, EP2xTP2": case(4, config=GLM, dp_shard=2, tp=2, ep=2),
    "mixtral, EP2": case(2, config=MIXTRAL, dp_shard=2, ep=2),
    "mixtral, EP2 of FSDP2xCP2": case(4, config=MIXTRAL, dp_shard=2, cp=2, ep=2),
}
# Sliding windows, a scaled embedding and norms of transformers' own classes; and tied weights.
GEMMA, TIED = hf_configs.config("gemma3"), hf_configs.config("llama, tied")
UNTIED_GEMMA = hf_configs.config("gemma3", tie_word_embeddings=False)
TRANSFORMERS = {
    "transformers, FSDP2, AC by op": case(
        2, config=GEMMA, dp_shard=2, activation_checkpoint=BY_OP, documents=True
    ),
    "transformers, TP2, documents": case(2, config=GEMMA, tp=2, documents=True),
    "transformers, FSDP2xTP2, tied": case(4, "adam", config=TIED, dp_shard=2, tp=2),
    "transformers, TP2, compiled, AC full": case(
        2, config=TIED, tp=2, compile="aot_eager", activation_checkpoint=FULL_AC
    ),
    "transformers, experts, FSDP2": case(2, config=hf_configs.config("experts"), dp_shard=2),
    "transformers, FSDP2, bf16": case(2, config=TIED, dp_shard=2, dtype="bfloat16", tolerance=0.05),
    "transformers, FSDP2, compiled": case(2, config=GEMMA, dp_shard=2, compile="aot_eager"),
    "transformers, qwen3, TP2": case(2, config=hf_configs.config("qwen3"), tp=2),
    "transformers, gpt_neox, TP2": case(2, config=hf_configs.config("gpt_neox"), tp=2),
    "transformers, gemma3, TP2, odd vocabulary": case(
        2, config=hf_configs.config("gemma3", vocab_size=65), tp=2, documents=True
    ),
    "transformers, mistral, TP2, documents": case(
        2, config=hf_configs.config("mistral"), tp=2, documents=True
    ),
    "transformers, gemma3, CP2, documents": case(2, config=UNTIED_GEMMA, cp=2, documents=True),
    "transformers, gemma3, PP2, documents": case(2, config=UNTIED_GEMMA, pp=2, documents=True),
    "transformers, experts, EP2": case(2, config=hf_configs.config("experts"), dp_shard=2, ep=2),
    "transformers, experts, TP2": case(2, config=hf_configs.config("experts"), tp=2),
    "transformers, experts, PP2xTP2": case(4, config=hf_configs.config("experts"), pp=2, tp=2),
    # attention whole on each rank, feed-forward networks in parts, by their usual names; the gradients of its
    # lambdas are small differences of large sums (2e-4 with the kernels of AVX2)
    "transformers, diffllama, TP2, documents": case(
        2, config=hf_configs.config("llama", model_type="diffllama"), tp=2, documents=True, tolerance=5e-4
    ),
    "transformers, phi3, TP2": case(2, config=hf_configs.config("phi3"), tp=2),
    "transformers, gemma4, TP2, documents": case(
        2, config=hf_configs.config("gemma4"), tp=2, documents=True, tolerance=3e-4
    ),
    "transformers, longcat_flash, TP2": case(2, config=hf_configs.config("longcat_flash"), tp=2),
    "transformers, hrm_text, TP2, documents": case(
        2, config=hf_configs.config("hrm_text"), tp=2, documents=True
    ),
    "transformers, hrm_text, FSDP2": case(2, config=hf_configs.config("hrm_text"), dp_shard=2),
}
LAYOUTS: dict[str, Case] = {
    **DATA,
    **TENSOR,
    **CONTEXT,
    **PIPELINE,
    **FLOAT8,
    **EXPERTS,
    **SINKS,
    **LATENTS,
    **MTP,
    **CHUNKS,
    **STATES,
    **OTHERS,
    **TRANSFORMERS,
}
WITH_FSDP2 = ("1F1B", "ZBVZeroBubble", "DualPipeV")
SLOW = {
    *("transformers, experts, TP2", "transformers, experts, PP2xTP2", "transformers, gemma3, PP2, documents"),
    *("transformers, experts, FSDP2", "transformers, gemma3, CP2, documents"),
    "TP2, compiled",
    *("gemma3, PP2xFSDP2", "gemma3, TP2, compiled, AC by op", "granite, PP2, compiled"),
    *("olmo3, CP2xTP2, documents", "olmo3, PP2xFSDP2", "olmo3, TP2, compiled, AC by op"),
    "mixtral, EP2 of FSDP2xCP2",
    *("mtp, EP2 of FSDP2xCP2, documents", "mtp, EP2xTP2, AC full, tied", "mtp, FSDP2, compiled"),
    *("mtp, FSDP2, accumulation, AC by op", "mtp, EP2xTP2, compiled"),
    *("FSDP2, documents", "TP2, bf16", "TP2, documents", "CP2, full logits"),
    *("CP2xTP2, allgather", "PP2, AC by op", "EP4", "EP2 of FSDP2xCP2", "llama4, PP2xEP2"),
    *("gpt_oss, CP2xTP2, documents", "gpt_oss, EP2, AC by op", "latent, PP2xEP2", "llama4, EP2, AC by op"),
    *("FSDP4", "HSDP2x2", "HSDP2x2, accumulation", "FSDP2, accumulation unsharded", "FSDP2, compiled"),
    *("FSDP2xTP2", "TP2, accumulation", "TP2, tied", "FSDP2xTP2, compiled, AC full"),
    *("TP4", "FSDP2xTP2, accumulation", "FSDP2, full logits"),
    *("CP4, allgather", "CP2xFSDP2, allgather", "CP2xFSDP2, accumulation", "CP2, bf16"),
    "CP2xTP2, compiled, AC by op",
    # Each schedule is run once, those that begin and end at one stage beside FSDP2.
    *(f"PP2xFSDP2, {name}" for name in SCHEDULES if name not in WITH_FSDP2),
    *(f"PP2, {name}" for name in WITH_FSDP2),
    *("PP4, Interleaved1F1B", "PP4, DualPipeV", "PP2xDDP2", "PP2xTP2, ZBVZeroBubble", "PP2xCP2"),
    *("PP2xFSDP2, compiled, AC full", "PP2xFSDP2, DualPipeV, bf16", "PP2xFSDP2, accumulation"),
    "PP2xFSDP2, always reshard",
    *("FSDP4, float8 rowwise", "FSDP2xTP2, float8 tensorwise"),
    *("EP2", "EP2, accumulation", "EP2xFSDP2", "EP2 of TP2", "EP4 of FSDP2xTP2", "EP2 of CP2", "PP2xEP2"),
    *("EP2xTP2", "gpt_oss, FSDP2", "latent, FSDP2", "llama4, FSDP2", "experts, TP2"),
    *("experts, FSDP4, two a rank", "EP2, AC full", "EP2, compiled", "EP2xTP2, compiled, AC full"),
    "shared, EP2xTP2, compiled, AC by op",
    *("gpt_oss, EP2xFSDP4", "gpt_oss, CP2, ulysses", "gpt_oss, CP2, allgather", "gpt_oss, TP2, compiled"),
    *("gpt_oss, EP2xTP2, compiled, AC by op", "gpt_oss, CP2, documents, compiled, AC full"),
    *("latent, TP2", "latent, CP2, allgather", "latent, EP2 of CP2xTP2, AC by op", "latent, FSDP2xTP2"),
    *("latent, EP2 of FSDP2xCP2", "latent, PP2xTP2", "latent, PP2xCP2, backward in two"),
    *("latent, EP2, compiled, AC by op", "latent, EP2xTP2, compiled, AC full"),
    *("llama4, TP2", "llama4, CP2, allgather", "llama4, EP2 of FSDP2xCP2, documents", "llama4, EP2xFSDP2"),
    *("llama4, PP2xCP2, backward in two", "llama4, CP2xTP2", "llama4, EP2, compiled, AC by op"),
    "llama4, CP2xTP2, documents, compiled, AC full",
    *("transformers, FSDP2, compiled", "transformers, qwen3, TP2", "transformers, gpt_neox, TP2"),
    *("transformers, mistral, TP2, documents", "transformers, TP2, compiled, AC full"),
    *("transformers, FSDP2, bf16", "transformers, FSDP2xTP2, tied", "transformers, FSDP2, AC by op"),
    *("EP2, compiled, AC by op", "gpt_oss, PP2xEP2", "FSDP2xTP2, tied"),
    *("llama4, EP2xTP2", "shared, EP2xTP2"),
    *(name for name in STATES if name not in ("delta, CP2xTP2, documents", "delta, PP2xEP2")),
}
"""Left to `make test-all`: all that is in them is in some row that is not left out, if not all at once."""
