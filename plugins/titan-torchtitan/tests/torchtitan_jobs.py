"""Job configs in torchtitan's format, written for these tests, and what is installed in them."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from titancli import builtin
from titancli.registry.component import component
from titancli.registry.lookup import Registry

LLAMA3_8B = """\
[job]
dump_folder = "./outputs"
description = "Llama 3 8B on 64 GPUs"

[profiling]
enable_profiling = true
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "always"

[checkpoint]
enable = true
folder = "checkpoint"
interval = 500
last_save_model_only = false
async_mode = "async"
keep_latest_k = 2

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
components = ["model", "loss"]

[debug]
seed = 42
"""
FLOAT8 = """\
[model]
name = "llama3"
flavor = "70B"
hf_assets_path = "./assets/hf/Llama-3.1-70B"
converters = ["quantize.linear.float8"]

[training]
steps = 100
dataset = "c4"

[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
filter_fqns = ["output", "attention.wk", "layers.0"]
"""
QWEN3 = """\
[model]
name = "qwen3"
flavor = "0.6B"
hf_assets_path = "./assets/hf/Qwen3-0.6B"

[training]
steps = 10
seq_len = 4096
"""
DEEPSEEK = """\
[model]
name = "deepseek_v3"
flavor = "16B"

[training]
steps = 500
dataset = "c4"

[parallelism]
expert_parallel_degree = 8
expert_parallel_comm_backend = "deepep"

[debug]
moe_force_load_balance = true
"""
FLUX = """\
[job]
custom_config_module = "torchtitan.models.flux.job_config"

[model]
name = "flux"
flavor = "flux-dev"

[training]
dataset = "cc12m-wds"
classifier_free_guidance_prob = 0.1
img_size = 256
steps = 30_000

[encoder]
t5_encoder = "google/t5-v1_1-xxl"
"""
OLD = """\
[job]
use_for_integration_test = true
[metrics]
rank_0_only = true
enable_color_printing = true
[model]
name = "llama"
flavor = "debugmodel"
norm_type = "fused_rmsnorm"
tokenizer_path = "./assets/llama/original/tokenizer.model"
[optimizer]
fused = false
[training]
batch_size = 4
warmup_steps = 2
steps = 10
compile = true
data_parallel_degree = -1
tensor_parallel_degree = 1
dataset = "c4_mini"
enable_fp8_linear = true
[experimental]
pipeline_parallel_degree = 1
[checkpoint]
enable_checkpoint = true
interval_type = "seconds"
"""


@component("converter", "float8_linear", target="torchtitan_jobs:build")
class Float8:
    """Stands for titan-float8's, with the fields that are written."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    enable_fsdp_float8_all_gather: bool = False
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    skip: list[str] = field(default_factory=list)
    emulate: bool | None = None


def build(config: Float8, **given: object) -> None:
    """Nothing is built in these tests."""


def registry_of(*more: tuple[str, type]) -> Registry:
    """titan's own components of the kinds that these jobs need, and those given."""
    mine = {"model": ["llama3"], "loop": ["pretrain"]}
    own = []
    for config in builtin.titan_components():
        info = config.__component__
        if info.name in mine.get(info.kind, [info.name]):
            own.append(("titan", config))
    return Registry(components=[*own, *more])


LAYOUT = """\
[training]
steps = 1000
enable_cpu_offload = true

[parallelism]
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "interleaved1f1b"
pipeline_parallel_microbatch_size = 2
pipeline_parallel_last_stage_less_layers = 0
context_parallel_degree = 2
context_parallel_rotate_method = "alltoall"

[activation_checkpoint]
mode = "memory_budget"
memory_budget = 0.25

[compile]
enable = true
components = ["model"]
"""
"""What a job can say of its layout. torchtitan takes a schedule's name in any case."""
