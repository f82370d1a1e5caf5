"""Fields of torchtitan before 0.2.2: renamed and removed ones."""

from __future__ import annotations

from titan_torchtitan.fields import FLOAT8, GROUPED_FLOAT8, GROUPED_MX, MX, Field, dropped, part

_DEGREES = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
_PIPELINE = (
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_microbatch_size",
    "pipeline_parallel_layers_per_stage",
    "context_parallel_degree",
    "context_parallel_rotate_method",
    "enable_async_tensor_parallel",
)
_FLOAT8 = (
    "enable_fsdp_float8_all_gather",
    "precompute_float8_dynamic_scale_for_fsdp",
    "recipe_name",
    "filter_fqns",
    "emulate",
)

RENAMED: dict[str, str] = {
    "job.print_args": "job.print_config",
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "training.context_parallel_degree": "parallelism.context_parallel_degree",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.compile": "compile.enable",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_in_safetensors_format": "checkpoint.last_save_in_hf",
    "memory_estimation.enabled": "memory_estimation.enable",
    **{f"training.{name}": f"parallelism.{name}" for name in _DEGREES},
    **{f"experimental.{name}": f"parallelism.{name}" for name in _PIPELINE},
    **{f"float8.{name}": f"{FLOAT8}.{name}" for name in _FLOAT8},
    "float8.moe_fqns_prototype": f"{GROUPED_FLOAT8}.fqns",
    "mx.mxfp8_dim1_cast_kernel_choice": f"{MX}.mxfp8_dim1_cast_kernel_choice",
    "mx.recipe_name": f"{MX}.recipe_name",
    "mx.filter_fqns": f"{MX}.filter_fqns",
    "mx.moe_fqns_prototype": f"{GROUPED_MX}.fqns",
}
"""Old names to names in 0.2.2, with the same meaning."""

_SPLIT = "name each stage's modules in pipeline.module_fqns_per_model_part instead"
_SCALING = "titan-float8 recomputes all scales in each step"

GONE: dict[str, Field] = {
    field.name: field
    for field in [
        dropped("job.use_for_integration_test", bool, False, "it was only used by torchtitan's own tests"),
        dropped("metrics.rank_0_only", bool, True, "metrics are aggregated over all ranks and written once"),
        dropped(
            "metrics.enable_color_printing",
            bool,
            False,
            "colors are used on a terminal unless NO_COLOR is set",
        ),
        dropped("model.norm_type", str, "rmsnorm", "the norm is part of the model's definition"),
        part("optimizer.fused", bool, None),
        dropped(
            "training.data_parallel_type", str, "fsdp", "for DDP set mesh.dp_replicate, and dp_shard = 1"
        ),
        dropped(
            "training.enable_loss_parallel",
            bool,
            True,
            "under tensor parallelism the loss is always parallel",
        ),
        part("training.enable_fp8_linear", bool, False),
        part("training.enable_float8_linear", bool, False),
        part("float8.enable_float8_linear", bool, False),
        dropped("float8.force_recompute_fp8_weight_in_bwd", bool, False, "titan-float8 has no such setting"),
        dropped("float8.scaling_type_input", str, "dynamic", _SCALING),
        dropped("float8.scaling_type_weight", str, "dynamic", _SCALING),
        dropped("float8.scaling_type_grad_output", str, "dynamic", _SCALING),
        dropped("checkpoint.interval_type", str, "steps", "the interval is always in steps; set it again"),
        dropped("parallelism.enable_compiled_autograd", bool, False, "compiled autograd is not used"),
        dropped("experimental.enable_compiled_autograd", bool, False, "compiled autograd is not used"),
        dropped("parallelism.pipeline_parallel_split_points", (list, str), [], _SPLIT),
        dropped("experimental.pipeline_parallel_split_points", (list, str), [], _SPLIT),
        dropped(
            "experimental.pipeline_parallel_microbatches",
            int,
            None,
            "set pipeline.microbatch_size instead, the number of rows of a micro-batch",
        ),
    ]
}
"""Fields removed before 0.2.2, by name."""
