"""The families of models, for `test_families.py`: published figures, small configs, and what each refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from titan_families import DeepSeekV3, Glm4Moe, Granite, Llama4, Mixtral, Olmo3
from titan_families.deepseek_v3 import LatentYarn
from titan_qwen3_next import Qwen3Next
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.models import Gemma3, GptOss, Llama3, Qwen3, RopeScaling
from titancli.models.blocks.state import named_state
from titancli.models.qwen3 import FactorYarn
from titancli.models.sections import AttnTemperature, LinearScaling, MoE, Yarn
from titancli.registry import current
from titancli.registry.binding import bind
from titancli.registry.component import build

LENGTH = 97
"""Past every window, chunk and original context of the small configs."""


@dataclass(frozen=True)
class Family:
    name: str
    config: Any
    sizes: Mapping[str, int]
    """Published numbers of parameters, by flavor."""
    flops: Mapping[str, float]
    """Published FLOPs per token with rows of 8,192 (debug models: 2,048), by flavor."""
    counted: tuple[str, ...]
    """Flavors whose FLOPs torch counts as the formula does."""
    small: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    """What the small configs change in `small`."""
    caches: tuple[str, ...]
    """The variants that are tried with a cache."""
    refused: tuple[tuple[str, Mapping[str, Any]], ...]
    """Changes of a flavor's config.json that the family cannot express."""
    routing: tuple[tuple[str, Mapping[str, Any], str], ...] = ()
    """Of a variant, changes of its moe that transformers cannot express, and what is said."""
    unfit: tuple[tuple[str, str], ...] = ()
    """Overrides of the family's debug recipe that do not fit, and what is said."""
    refusals: str = "quantized with"
    """What refusals say in addition to `does not support`."""
    not_seen: Callable[[Any], float] = field(default=lambda config: 0.0)
    """FLOPs per token of rows of 8,192 that the published figure counts and no layer computes."""

    def flavor(self, name: str) -> Any:
        return bind(self.config, self.config.flavors[name], current())

    def variant(self, name: str, **changes: Any) -> Any:
        return self.config(**{**self.small, **self.variants[name], **changes})

    def model(self, name: str) -> Any:
        """A model in which every parameter is its own, so that one that is taken for another shows."""
        config = self.variant(name)
        model = build(config, seq_len=128)
        model.init_weights(lambda name: torch.Generator().manual_seed(sum(map(ord, name))))
        loses_biases = hf_form(config).loses_biases
        with torch.no_grad():
            for name, tensor in named_state(model):
                draw = torch.Generator().manual_seed(sum(map(ord, name)))
                if "norm" in name:
                    tensor += torch.empty_like(tensor).normal_(0.0, 0.2, generator=draw)
                elif name.endswith("expert_bias"):
                    tensor.normal_(0.0, 0.0 if loses_biases else 0.1, generator=draw)
                elif name.endswith(("bias", "sinks")):
                    tensor.normal_(0.0, 0.5, generator=draw)
                elif name.endswith("A_log"):
                    tensor.clamp_(max=0.0)  # transformers loses digits of faster decay
                elif "layers" in name and not name.endswith("conv"):
                    tensor.mul_(8)  # the blocks weigh as much as the embedding
        return model.eval()


LLAMA3 = Family(
    name="llama3",
    config=Llama3,
    sizes={
        "debugmodel": 6_163_712,
        "1B": 1_235_814_400,
        "3B": 3_212_749_824,
        "8B": 8_030_261_248,
        "70B": 70_553_706_496,
        "405B": 405_853_388_800,
    },
    flops={"debugmodel": 7.159e7, "8B": 5.791e10, "70B": 4.814e11, "405B": 2.625e12},
    counted=("debugmodel",),
    small=dict(dim=64, n_layers=2, n_heads=4, hidden_dim=96, vocab_size=128),
    variants={
        "multi-head": {},
        "grouped": {"n_kv_heads": 2},
        "tied": {"tied": True, "n_kv_heads": 2},
        "head_dim": {"head_dim": 32},
        "scaled-rope": {
            "rope_scaling": RopeScaling(
                factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
            ),
            "rope_theta": 10000.0,
        },
    },
    caches=("grouped", "scaled-rope"),
    refused=tuple(
        ("debugmodel", change)
        for change in (
            {"attention_bias": True},
            {"hidden_act": "gelu"},
            {"rope_scaling": {"rope_type": "yarn"}},
        )
    ),
)

SOFTMAX = {"score_func": "softmax", "route_norm": True, "score_before_experts": False}
QWEN3 = Family(
    name="qwen3",
    config=Qwen3,
    sizes={
        "debugmodel": 31_987_968,
        "0.6B": 596_049_920,
        "1.7B": 1_720_574_976,
        "4B": 4_022_468_096,
        "8B": 8_190_735_360,
        "14B": 14_768_307_200,
        "32B": 32_762_123_264,
        "debugmodel_moe": 315_758_848,
        "30B-A3B": 30_532_122_624,
        "235B-A22B": 235_093_634_560,
    },
    # Those whose weights are not tied: the published figures leave a tied output's product out.
    flops={
        "8B": 5.991e10,
        "14B": 1.041e11,
        "32B": 2.434e11,
        "debugmodel_moe": 7.086e8,
        "30B-A3B": 3.758e10,
        "235B-A22B": 2.051e11,
    },
    counted=("debugmodel", "debugmodel_moe"),
    small=dict(dim=64, n_layers=2, n_heads=4, head_dim=24, vocab_size=128, rope_theta=10000.0),
    variants={
        "multi-head": dict(hidden_dim=96),
        "grouped": dict(hidden_dim=96, n_kv_heads=2),
        "tied": dict(hidden_dim=96, n_kv_heads=2, tied=True),
        "experts": dict(n_kv_heads=2, moe=MoE(num_experts=8, top_k=3, hidden_dim=48, **SOFTMAX)),
        "experts, not renormalised": dict(
            moe=MoE(num_experts=8, top_k=2, hidden_dim=48, **{**SOFTMAX, "route_norm": False})
        ),
        "balanced experts": dict(
            moe=MoE(num_experts=4, top_k=2, hidden_dim=48, load_balance_coeff=1e-3, **SOFTMAX)
        ),
        "YaRN": dict(hidden_dim=96, rope_scaling=FactorYarn(factor=4.0, original_max_position=32)),
        "YaRN, experts": dict(
            moe=MoE(num_experts=8, top_k=3, hidden_dim=48, **SOFTMAX),
            rope_scaling=FactorYarn(
                factor=2.5,
                original_max_position=16,
                beta_fast=8.0,
                beta_slow=2.0,
                truncate=False,
                attention_factor=1.3,
            ),
        ),
    },
    caches=("grouped", "experts", "YaRN"),
    refused=tuple(
        ("30B-A3B", change)
        for change in (
            {"attention_bias": True},
            {"hidden_act": "gelu"},
            {"use_sliding_window": True},
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "low_freq_factor": 1.0}},
            {"decoder_sparse_step": 2},
            {"mlp_only_layers": [0]},
            {"quantization_config": {"quant_method": "awq"}},
        )
    ),
    routing=(
        (
            "experts",
            {"score_func": "sigmoid", "score_before_experts": True},
            "no moe.score_func = 'sigmoid', moe.score_before_experts = True",
        ),
    ),
)

SHARED = {**SOFTMAX, "num_shared_experts": 1}
QWEN3_NEXT = Family(
    name="qwen3_next",
    config=Qwen3Next,
    sizes={"debugmodel": 1_951_632, "debugmodel_dense": 1_193_360, "80B-A3B": 79_674_391_296},
    flops={},
    counted=("debugmodel", "debugmodel_dense"),
    small=dict(
        dim=64,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        head_dim=24,
        partial_rotary_factor=0.25,
        vocab_size=128,
        rope_theta=10000.0,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
    ),
    variants={
        "as released": dict(moe=MoE(num_experts=8, top_k=3, hidden_dim=48, **SHARED)),
        "balanced, a value head each, tied": dict(
            n_layers=3,
            full_attention_interval=3,
            linear_num_key_heads=4,
            linear_conv_kernel_dim=2,
            tied=True,
            moe=MoE(
                num_experts=4,
                top_k=2,
                hidden_dim=24,
                load_balance_coeff=1e-3,
                **{**SHARED, "num_shared_experts": 2},
            ),
        ),
        "mostly delta, not renormalised": dict(
            full_attention_interval=4,
            moe=MoE(num_experts=4, top_k=2, hidden_dim=24, **{**SHARED, "route_norm": False}),
        ),
        "3.5": dict(hidden_dim=96, tied=True),
        "3.5, experts": dict(hf_layout="qwen3_5", moe=MoE(num_experts=8, top_k=3, hidden_dim=48, **SHARED)),
    },
    caches=("as released", "3.5"),
    refused=tuple(
        ("80B-A3B", change)
        for change in (
            {"attention_bias": True},
            {"hidden_act": "gelu"},
            {"attn_output_gate": False},
            {"layer_types": ["full_attention", *["linear_attention"] * 47]},
            {"layer_types": ["linear_attention"] * 47 + ["sliding_attention"]},
            {"mlp_only_layers": [0]},
            {"decoder_sparse_step": 2},
            {"shared_expert_intermediate_size": 500},
            {"shared_expert_intermediate_size": 0},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        )
    ),
    refusals="quantized with|cannot be read",
    routing=(
        ("as released", {"score_func": "sigmoid"}, "no moe.score_func = 'sigmoid'"),
        ("3.5, experts", {"route_norm": False}, "no moe.route_norm = False"),
    ),
    unfit=(
        ("model.hidden_dim=64", "set hidden_dim for a dense model or moe.hidden_dim"),
        ("model.moe.num_shared_experts=0", "qwen3_next has a shared expert in each layer"),
        ("model.partial_rotary_factor=0.02", "partial_rotary_factor of head_dim is 1"),
        ("model.linear_num_value_heads=6", "linear_num_value_heads 6 is not divisible by"),
        ("mesh.cp=2 model.linear_num_key_heads=1", "mesh.tp x mesh.cp = 2 does not divide"),
    ),
)

GPT_OSS_ROUTING = {**SOFTMAX, "gate_bias": True}
YARN = Yarn(factor=4.0, original_max_position=32, truncate=False)
GPT_OSS = Family(
    name="gpt_oss",
    config=GptOss,
    sizes={"debugmodel": 81_489_440, "20b": 20_914_757_184, "120b": 116_829_156_672},
    # As published: as if every layer saw the whole row.
    flops={"20b": 3.131e10, "120b": 4.529e10},
    not_seen=lambda config: 12 * (config.n_layers / 2) * 64 * 64 * (8192 - 128),
    counted=(),
    small=dict(
        dim=64,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        vocab_size=128,
        sliding_window=16,
        moe=MoE(num_experts=8, top_k=3, hidden_dim=48, **GPT_OSS_ROUTING),
        max_seq_len=256,
    ),
    variants={
        "as released": dict(yarn=YARN),
        "whole pairs": dict(yarn=Yarn(factor=8.0, original_max_position=16, beta_fast=16.0)),
        "no YaRN": dict(),
        "clamped much": dict(yarn=YARN, swiglu_limit=0.5, swiglu_alpha=3.0),
        "a key head each": dict(n_kv_heads=4),
        "balanced, tied": dict(
            yarn=YARN,
            tied=True,
            moe=MoE(num_experts=4, top_k=2, hidden_dim=48, load_balance_coeff=1e-3, **GPT_OSS_ROUTING),
        ),
    },
    caches=("as released", "a key head each"),
    refused=tuple(
        ("120b", change)
        for change in (
            {"attention_bias": False},
            {"hidden_act": "gelu"},
            {"layer_types": ["full_attention"] * 36},
            {"rope_scaling": {"rope_type": "llama3"}},
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0}},
            {"quantization_config": {"quant_method": "awq"}},
        )
    ),
    routing=(
        (
            "as released",
            {"score_func": "sigmoid", "route_norm": False},
            "no moe.score_func = 'sigmoid', moe.route_norm = False",
        ),
    ),
    unfit=(
        ("model.moe.top_k=9", "top_k 9 is greater than num_experts 8"),
        ("model.moe.num_shared_experts=1", "gpt_oss has no shared experts"),
        ("model.yarn.beta_fast=0.5", "beta_fast must be greater than beta_slow"),
        ("model.n_kv_heads=7", "n_heads 16 is not divisible by n_kv_heads 7"),
        ("mesh.ep=3", "mesh.ep = 3 does not divide n_experts 8"),
        (
            "mesh.cp=2 parallelize.context_parallel=ring",
            "the ring computes plain attention, but that of the model has sinks, sliding windows",
        ),
    ),
)

CHUNK = 20
LLAMA4_EXPERTS = MoE(num_experts=4, top_k=1, hidden_dim=48, num_shared_experts=1)
IROPE = dict(every_n_layers_nope=2, fixed_attn_block_size=CHUNK)
TEMPERATURE = AttnTemperature(floor_scale=8, attn_scale=0.4)
INTERLEAVED = dict(interleave_moe_layer_step=2, hidden_dim=96)
STRETCHED = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position=32)
LLAMA4 = Family(
    name="llama4",
    config=Llama4,
    sizes={
        "debugmodel": 15_017_216,
        "debugmodel_irope": 15_017_216,
        "17bx16e": 107_769_861_120,
        "17bx16e_irope": 107_769_861_120,
        "17bx128e": 400_711_848_960,
        "17bx128e_irope": 400_711_848_960,
    },
    # The published figure of debugmodel_irope counts its chunks as whole rows, and is left out.
    flops={
        "debugmodel": 7.516e7,
        "17bx16e": 1.210e11,
        "17bx16e_irope": 1.210e11,
        "17bx128e": 1.211e11,
        "17bx128e_irope": 1.211e11,
    },
    counted=("debugmodel", "debugmodel_irope"),
    small=dict(
        dim=64,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        head_dim=24,
        vocab_size=128,
        rope_theta=10000.0,
        moe=LLAMA4_EXPERTS,
    ),
    variants={
        "plain": {},
        "interleaved, tied": dict(**INTERLEAVED, tied=True),
        "iRoPE": dict(**INTERLEAVED, **IROPE),
        "chunks alone": dict(fixed_attn_block_size=CHUNK),
        "Scout": dict(
            **IROPE, rope_scaling=STRETCHED, qk_norm=True, attn_temperature=TEMPERATURE, head_dim=None
        ),
        "Maverick": dict(
            **INTERLEAVED,
            **IROPE,
            attn_temperature=TEMPERATURE,
            moe=replace(LLAMA4_EXPERTS, num_experts=8, top_k=2, load_balance_coeff=1e-3),
        ),
    },
    caches=("Scout", "Maverick"),
    refused=tuple(
        ("debugmodel_irope", change)
        for change in (
            {"attention_bias": True},
            {"hidden_act": "gelu"},
            {"rope_scaling": {"rope_type": "yarn"}},
            {"moe_layers": [0, 3]},
            {"moe_layers": []},
            {"no_rope_layers": [1, 0, 0, 1]},
            {"layer_types": ["chunked_attention"] * 4},
            {"quantization_config": {"quant_method": "compressed-tensors"}},
        )
    ),
    refusals="quantized with|no layers with experts|in no others",
    routing=(
        (
            "plain",
            {"route_norm": True, "num_shared_experts": 0},
            "Llama4ForCausalLM has no moe.route_norm = True, moe.num_shared_experts = 0",
        ),
    ),
    unfit=(
        ("model.interleave_moe_layer_step=9", "none of the 4 blocks would have experts"),
        ("model.flavor=17bx16e model.interleave_moe_layer_step=2", "need a hidden_dim"),
        ("model.interleave_moe_layer_step=1", "remove hidden_dim"),
        ("model.flavor=debugmodel model.attn_temperature={}", "but there are none: see every_n_layers"),
        ("model.moe.top_k=9", "top_k 9 is greater than num_experts 8"),
        ("mesh.dp_shard=6 mesh.ep=6", "ep = 6 does not divide n_experts 8"),
        ("mesh.cp=2 parallelize.context_parallel=ring", "that of the model has chunks"),
    ),
)

V2 = dict(
    num_experts=8,
    top_k=3,
    hidden_dim=24,
    num_shared_experts=2,
    score_func="softmax",
    score_before_experts=False,
    load_balance_coeff=1e-3,
)
V3 = dict(V2, score_func="sigmoid", route_norm=True, route_scale=2.5, num_shared_experts=1)
GROUPS = dict(num_expert_groups=4, num_limited_groups=2)
LATENT_YARN = LatentYarn(factor=4.0, original_max_position=32, mscale=0.7)
DEEPSEEK = Family(
    name="deepseek_v3",
    config=DeepSeekV3,
    sizes={
        "debugmodel": 33_014_016,
        "16B": 15_706_484_224,
        "236B": 235_741_434_880,
        "671B": 671_026_404_352,
    },
    flops={"debugmodel": 5.429e8, "16B": 2.150e10, "236B": 2.459e11, "671B": 3.426e11},
    counted=("debugmodel", "671B"),
    small=dict(
        dim=64,
        n_layers=3,
        n_heads=4,
        hidden_dim=96,
        vocab_size=128,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    variants={
        "V2": dict(moe=MoE(**V2)),
        "V2, groups, query latent, YaRN": dict(
            q_lora_rank=40,
            rope_scaling=LATENT_YARN,
            moe=MoE(**V2, **GROUPS, route_scale=16.0, group_top_k=1),
        ),
        "V3": dict(q_lora_rank=40, n_dense_layers=2, moe=MoE(**V3)),
        "V3, groups, YaRN": dict(
            q_lora_rank=40, rope_scaling=replace(LATENT_YARN, mscale=1.0), moe=MoE(**V3, **GROUPS)
        ),
        "V3, no bias, tied": dict(
            n_dense_layers=0, tied=True, moe=MoE(**{**V3, "load_balance_coeff": None, "route_norm": False})
        ),
    },
    caches=("V2", "V3, groups, YaRN"),
    refused=(
        ("671B", {"attention_bias": True}),
        ("671B", {"hidden_act": "gelu"}),
        ("671B", {"num_key_value_heads": 8}),
        ("671B", {"moe_layer_freq": 2}),
        ("671B", {"scoring_func": "softmax"}),
        ("671B", {"rope_interleave": False}),
        ("671B", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("671B", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("671B", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0}}),
        ("671B", {"rope_scaling": {"type": "yarn", "factor": 40}}),
        ("671B", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0, "mscale_all_dim": 0}}),
        ("671B", {"quantization_config": {"quant_method": "awq"}}),
        ("236B", {"norm_topk_prob": True}),
        ("236B", {"n_shared_experts": None}),
    ),
    routing=(
        ("V2", {"route_norm": True}, "DeepseekV2ForCausalLM has no moe.route_norm = True"),
        ("V2", {**GROUPS}, "DeepseekV2ForCausalLM has no moe.group_top_k = 2"),
        ("V3, groups, YaRN", {"group_top_k": 1}, "DeepseekV3ForCausalLM has no moe.group_top_k = 1"),
        ("V3", {"score_before_experts": True, "num_shared_experts": 0}, "True, moe.num_shared_experts = 0"),
    ),
    unfit=(
        ("model.qk_rope_head_dim=63", "rotary embedding needs an even qk_rope_head_dim"),
        ("model.v_head_dim=200", "v_head_dim 200 is more than qk_nope_head_dim + qk_rope_head_dim, 192"),
        ("model.n_dense_layers=3", "n_dense_layers 3 leaves none of the 3 layers with experts"),
        ("model.moe.top_k=9", "top_k 9 is greater than num_experts 8"),
        ("training.seq_len=20000", "training.seq_len 20000 is beyond the model's 16384"),
        (
            "model.moe.num_expert_groups=8 model.moe.num_limited_groups=4",
            "num_experts 8 cannot be divided into 8 groups of group_top_k 2 or more",
        ),
        ("mesh.tp=3", "mesh.tp = 3 does not divide n_heads 8"),
        ("mesh.ep=3", "mesh.ep = 3 does not divide n_experts 8"),
        (
            "mesh.cp=2 parallelize.context_parallel=ring",
            "the ring needs keys and values of the same width, which the model deepseek_v3 does not have",
        ),
    ),
)

DENSE = dict(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=128, max_seq_len=256)
MIXTRAL = Family(
    name="mixtral",
    config=Mixtral,
    sizes={"debugmodel": 8_005_888, "8x7B": 46_702_792_704, "8x22B": 140_620_634_112},
    flops={},
    counted=("debugmodel",),
    small=dict(DENSE, n_layers=2, moe=MoE(num_experts=8, top_k=2, hidden_dim=48, **SOFTMAX)),
    variants={
        "as released": {},
        "window, head_dim": dict(sliding_window=16, head_dim=24, rope_theta=10000.0),
        "tied, balanced": dict(
            tied=True, moe=MoE(num_experts=4, top_k=3, hidden_dim=48, load_balance_coeff=1e-3, **SOFTMAX)
        ),
    },
    caches=("as released", "window, head_dim"),
    refused=(
        ("8x7B", {"attention_bias": True}),
        ("8x7B", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
        ("8x7B", {"quantization_config": {"quant_method": "awq"}}),
    ),
    routing=(("as released", {"route_norm": False}, "MixtralForCausalLM has no moe.route_norm = False"),),
    unfit=(("mesh.ep=3", "mesh.ep = 3 does not divide n_experts 8"),),
)
OLMO3_YARN = Yarn(factor=4.0, original_max_position=32)
OLMO3 = Family(
    name="olmo3",
    config=Olmo3,
    sizes={"debugmodel": 4_066_816, "7B": 7_298_011_136, "32B": 32_233_522_176},
    flops={},
    counted=("debugmodel",),
    small=dict(DENSE, n_layers=5, hidden_dim=96, sliding_window=16),
    variants={
        "grouped": {},
        "as released": dict(n_kv_heads=4, rope_scaling=OLMO3_YARN),
        "tied, head_dim": dict(tied=True, head_dim=24, sliding_window=300),
    },
    caches=("grouped", "as released"),
    refused=(
        ("7B", {"attention_bias": True}),
        ("7B", {"rope_theta": 10000.0}),
        ("7B", {"layer_types": ["full_attention"] * 32}),
        ("7B", {"rope_scaling": {"rope_type": "llama3"}}),
        (
            "debugmodel",
            {
                "rope_parameters": {
                    k: {"rope_type": "linear"} for k in ("full_attention", "sliding_attention")
                }
            },
        ),
        (
            "debugmodel",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                }
            },
        ),
    ),
    unfit=(("mesh.cp=2 parallelize.context_parallel=ring", "that of the model has sliding windows"),),
)
GLM_EXPERTS = MoE(**{**V3, "route_scale": 1.5})
GLM4_MOE = Family(
    name="glm4_moe",
    config=Glm4Moe,
    sizes={"debugmodel": 7_612_160, "106B-A12B": 106_852_245_504, "355B-A32B": 352_797_814_784},
    flops={},
    counted=("debugmodel",),
    small=dict(DENSE, n_layers=3, hidden_dim=96, moe=GLM_EXPERTS),
    variants={
        "Air": {},
        "as released": dict(qk_norm=True, head_dim=24, n_dense_layers=2),
        "groups, no bias": dict(attention_bias=False, moe=replace(GLM_EXPERTS, **GROUPS, route_norm=False)),
        "whole heads, tied": dict(
            tied=True, partial_rotary_factor=1.0, moe=replace(GLM_EXPERTS, load_balance_coeff=None)
        ),
    },
    caches=("Air", "as released"),
    refused=(
        ("106B-A12B", {"hidden_act": "gelu"}),
        ("106B-A12B", {"n_shared_experts": 0}),
        ("106B-A12B", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ),
    routing=(("Air", {"score_func": "softmax"}, "Glm4MoeForCausalLM has no moe.score_func = 'softmax'"),),
    unfit=(
        ("model.partial_rotary_factor=0.2", "partial_rotary_factor of head_dim is 3"),
        ("model.partial_rotary_factor=0.05", "partial_rotary_factor of head_dim is 0"),
        ("model.n_dense_layers=9", "leaves none of the 4 layers with experts"),
    ),
)

GEMMA3 = Family(
    name="gemma3",
    config=Gemma3,
    # The releases' own, without what sees images.
    sizes={
        "debugmodel": 5_250_048,
        "270M": 268_098_176,
        "1B": 999_885_952,
        "4B": 3_880_263_168,
        "12B": 11_766_034_176,
        "27B": 27_009_346_304,
    },
    flops={},
    counted=(),  # torch counts what windows are computed in: see test_gpt_oss.py
    small=dict(DENSE, n_layers=7, head_dim=24, hidden_dim=96, sliding_window=16),
    variants={
        "as released": {},
        "stretched": dict(rope_scaling=LinearScaling(factor=4.0), query_pre_attn_scalar=40, n_kv_heads=1),
        "capped, untied": dict(logit_cap=2.0, tied=False, sliding_window=300, rope_local_theta=500.0),
    },
    caches=("as released", "stretched"),
    refused=(
        ("1B", {"attention_bias": True}),
        ("1B", {"attn_logit_softcapping": 50.0}),
        ("1B", {"hidden_activation": "gelu"}),
        ("1B", {"sliding_window_pattern": 2}),
        ("1B", {"layer_types": ["full_attention"] * 26}),
        ("1B", {"use_bidirectional_attention": True}),
        ("4B", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}),
    ),
    unfit=(
        ("mesh.cp=2 parallelize.context_parallel=ring", "that of the model has sliding windows"),
        ("model.n_kv_heads=3", "n_heads 4 is not divisible by n_kv_heads 3"),
    ),
)
GRANITE = Family(
    name="granite",
    config=Granite,
    sizes={
        "debugmodel": 3_541_248,
        "3.3-2B": 2_533_539_840,
        "3.3-8B": 8_170_864_640,
        "4.1-3B": 3_402_836_480,
        "4.1-8B": 8_380_551_168,
        "4.1-30B": 28_865_728_512,
    },
    flops={},
    counted=("debugmodel",),
    small=dict(DENSE, n_layers=2, hidden_dim=96, rope_theta=10000.0),
    variants={
        "as released": dict(
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.0625,
            logits_scaling=8.0,
            tied=True,
        ),
        "no multipliers, head_dim": dict(head_dim=24),
    },
    caches=("as released",),
    refused=(
        ("3.3-2B", {"attention_bias": True}),
        ("3.3-2B", {"mlp_bias": True}),
        ("3.3-2B", {"hidden_act": "gelu"}),
        ("3.3-2B", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ),
    unfit=(("model.n_kv_heads=3", "n_heads 16 is not divisible by n_kv_heads 3"),),
)

FAMILIES = (
    *(LLAMA3, QWEN3, QWEN3_NEXT, GPT_OSS, LLAMA4, DEEPSEEK, MIXTRAL, OLMO3, GLM4_MOE),
    *(GEMMA3, GRANITE),
)
