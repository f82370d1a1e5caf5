"""Every field of a torchtitan 0.2.2 job config, and its translation.

`carried`: the recipe has a key with the same meaning. `dropped`: it has none, and the reason is reported
unless the value matches what titan does anyway. `part`: one of several fields that together define a
component; read by `parts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_FAULT = "titan has no TorchFT; `--resume` and the launcher's max_restarts restart a run"
_LOADER = "titan's worker processes (training.dataloader.num_workers) need a dataset such as token_shards"


@dataclass(frozen=True)
class Field:
    name: str
    """`section.field`."""
    types: tuple[type, ...]
    default: Any
    to: str | None = None
    """Recipe key that takes the value."""
    why: str = ""
    """Reason to report if the value cannot be carried over."""
    titan: Any = None
    """Value that matches what titan does anyway."""
    always: bool = False
    """Whether the recipe gets the value even if the job omits it, because titan's own default differs."""


def carried(
    name: str, types: Any, default: Any, to: str = "", *, always: bool = False, why: str = ""
) -> Field:
    return Field(name, _types(types), default, to or name, why, default, always)


def dropped(name: str, types: Any, default: Any, why: str, **titan: Any) -> Field:
    return Field(name, _types(types), default, None, why, titan.get("titan", default))


def part(name: str, types: Any, default: Any) -> Field:
    return Field(name, _types(types), default)


def _types(types: Any) -> tuple[type, ...]:
    given = types if isinstance(types, tuple) else (types,)
    return (*given, int) if float in given else given


def _loader(section: str) -> list[Field]:
    return [
        dropped(f"{section}.num_workers", int, 0, _LOADER),
        dropped(f"{section}.persistent_workers", bool, False, _LOADER),
        dropped(f"{section}.pin_memory", bool, False, "titan always pins batches when there is a GPU"),
        dropped(f"{section}.prefetch_factor", int, None, _LOADER),
    ]


def _profiling() -> list[Field]:
    rows: list[tuple[str, type, Any]] = [
        ("enable_profiling", bool, False),
        ("save_traces_folder", str, "profile_traces"),
        ("profile_freq", int, 10),
        ("profiler_active", int, 1),
        ("profiler_warmup", int, 3),
        ("enable_memory_snapshot", bool, False),
        ("save_memory_snapshot_folder", str, "memory_snapshot"),
    ]
    return [carried(f"profiling.{name}", t, d) for name, t, d in rows]


JOB = [
    dropped("job.config_file", str, None, "a recipe names its base recipes with `extends`"),
    dropped("job.dump_folder", str, "./outputs", "the run folder is set on the command line: --run-dir DIR"),
    carried("job.description", str, "default job", "description"),
    dropped("job.print_config", bool, False, "`titan recipe show RECIPE` prints the resolved recipe"),
    dropped(
        "job.save_config_file", str, None, "every run folder contains its resolved recipe, recipe.lock.toml"
    ),
    dropped("job.custom_config_module", str, "", "a recipe runs no code; provide its components in a plugin"),
]
METRICS = [
    carried("metrics.log_freq", int, 10),
    part("metrics.enable_tensorboard", bool, False),
    dropped("metrics.disable_color_printing", bool, False, "set NO_COLOR in the environment"),
    dropped("metrics.save_tb_folder", str, "tb", "TensorBoard files are in tb/ of the run folder"),
    dropped(
        "metrics.save_for_all_ranks", bool, False, "metrics are aggregated over all ranks and written once"
    ),
    part("metrics.enable_wandb", bool, False),
]
MODEL = [
    part("model.name", str, "llama3"),
    part("model.flavor", str, "debugmodel"),
    part("model.hf_assets_path", str, "./tests/assets/tokenizer"),
    part("model.tokenizer_path", str, None),
    part("model.converters", (list, str), []),
    dropped("model.print_after_conversion", bool, False, "titan does not print modules"),
]
OPTIMIZER = [
    part("optimizer.name", str, "AdamW"),
    carried("optimizer.lr", float, 8e-4),
    carried("optimizer.beta1", float, 0.9),
    carried("optimizer.beta2", float, 0.95),
    carried("optimizer.eps", float, 1e-8),
    carried("optimizer.weight_decay", float, 0.1),
    carried("optimizer.implementation", str, "fused"),
    dropped(
        "optimizer.early_step_in_backward",
        bool,
        False,
        "the optimizer steps once, after all gradients have been computed",
    ),
]
SCHEDULE = [
    part("lr_scheduler.warmup_steps", int, 200),
    carried("lr_scheduler.total_steps", int, None),
    part("lr_scheduler.decay_ratio", float, None),
    carried("lr_scheduler.decay_type", str, "linear"),
    carried("lr_scheduler.min_lr_factor", float, 0.0),
]
TRAINING = [
    part("training.dataset", str, "c4_test"),
    part("training.dataset_path", str, None),
    carried("training.local_batch_size", int, 8),
    part("training.global_batch_size", int, -1),
    carried("training.seq_len", int, 2048),
    carried("training.max_norm", float, 1.0),
    carried("training.steps", int, 10000, always=True),
    carried("training.enable_cpu_offload", bool, False, "parallelize.cpu_offload"),
    carried("training.dtype", str, "float32"),
    carried("training.mixed_precision_param", str, "bfloat16"),
    carried("training.mixed_precision_reduce", str, "float32"),
    carried("training.gc_freq", int, 50),
    dropped("training.gc_debug", bool, False, "titan has no debug output for garbage collection"),
    *_loader("training.dataloader"),
]
PARALLELISM = [
    carried("parallelism.data_parallel_replicate_degree", int, 1, "mesh.dp_replicate"),
    carried("parallelism.data_parallel_shard_degree", int, -1, "mesh.dp_shard"),
    carried("parallelism.fsdp_reshard_after_forward", str, "default", "parallelize.reshard_after_forward"),
    carried("parallelism.tensor_parallel_degree", int, 1, "mesh.tp"),
    dropped(
        "parallelism.disable_loss_parallel",
        bool,
        False,
        "under tensor parallelism the loss is always parallel",
    ),
    part("parallelism.enable_async_tensor_parallel", bool, False),
    carried("parallelism.pipeline_parallel_degree", int, 1, "mesh.pp"),
    carried("parallelism.module_fqns_per_model_part", list, None, "pipeline.module_fqns_per_model_part"),
    carried(
        "parallelism.pipeline_parallel_first_stage_less_layers", int, 1, "pipeline.first_stage_less_layers"
    ),
    carried(
        "parallelism.pipeline_parallel_last_stage_less_layers", int, 1, "pipeline.last_stage_less_layers"
    ),
    carried("parallelism.pipeline_parallel_layers_per_stage", int, None, "pipeline.layers_per_stage"),
    part("parallelism.pipeline_parallel_schedule", str, "1F1B"),
    dropped(
        "parallelism.pipeline_parallel_schedule_csv",
        str,
        "",
        "titan runs torch's named schedules, not schedules from a file",
    ),
    carried("parallelism.pipeline_parallel_microbatch_size", int, 1, "pipeline.microbatch_size"),
    dropped(
        "parallelism.pipeline_parallel_expert_parallel_overlap",
        bool,
        True,
        "DualPipeV runs as torch implements it",
    ),
    carried("parallelism.context_parallel_degree", int, 1, "mesh.cp"),
    dropped(
        "parallelism.context_parallel_load_balancer",
        str,
        "headtail",
        "rows are always split head-tail, which balances causal attention",
    ),
    part("parallelism.context_parallel_rotate_method", str, "allgather"),
    carried("parallelism.expert_parallel_degree", int, 1, "mesh.ep"),
    dropped(
        "parallelism.expert_tensor_parallel_degree",
        int,
        1,
        "experts have no tensor-parallel degree of their own",
    ),
    part("parallelism.expert_parallel_comm_backend", str, "standard"),
]
CHECKPOINT = [
    carried("checkpoint.enable", bool, False, always=True),
    dropped("checkpoint.enable_ft_dataloader_checkpoints", bool, True, _FAULT),
    dropped("checkpoint.folder", str, "checkpoint", "checkpoints are in checkpoints/ of the run folder"),
    carried("checkpoint.interval", int, 500),
    part("checkpoint.initial_load_path", str, None),
    dropped(
        "checkpoint.initial_load_model_only",
        bool,
        True,
        "weights = HF_FOLDER loads weights; with a checkpoint of titan, checkpoint.initial_load_model_only = "
        "false loads its whole state",
    ),
    part("checkpoint.initial_load_in_hf", bool, False),
    dropped(
        "checkpoint.initial_load_in_hf_quantized",
        bool,
        False,
        "weights = HF_FOLDER reads quantized folders without a setting",
    ),
    part("checkpoint.last_save_model_only", bool, True),
    part("checkpoint.last_save_in_hf", bool, False),
    part("checkpoint.export_dtype", str, "float32"),
    carried("checkpoint.async_mode", str, "disabled"),
    carried("checkpoint.keep_latest_k", int, 10),
    dropped(
        "checkpoint.load_step", int, -1, "given when a run is resumed: titan train RUN --resume --step N"
    ),
    part("checkpoint.exclude_from_loading", (list, str), []),
    part("checkpoint.enable_first_step_checkpoint", bool, False),
    part("checkpoint.create_seed_checkpoint", bool, False),
    part("checkpoint.load_only", bool, False),
]
ACTIVATION_CHECKPOINT = [
    part("activation_checkpoint.mode", str, "selective"),
    part("activation_checkpoint.selective_ac_option", (str, int), "2"),
    dropped(
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        list,
        ["moe.router.gate"],
        "the outputs of all matrix multiplications are treated alike",
    ),
    dropped("activation_checkpoint.early_stop", bool, False, "torch decides where recomputation stops"),
    carried("activation_checkpoint.memory_budget", float, 0.5),
    dropped(
        "activation_checkpoint.visualize_memory_budget_pareto",
        bool,
        False,
        "titan does not plot memory budgets",
    ),
    dropped("activation_checkpoint.preserve_rng_state", bool, True, "the random state is always preserved"),
    dropped("activation_checkpoint.determinism_check", str, "default", "torch's default check is used"),
    dropped("activation_checkpoint.debug", bool, False, "titan has no debug output for recomputation"),
]
COMPILE = [
    carried("compile.enable", bool, False),
    part("compile.components", (list, str), ["model", "loss"]),
    carried("compile.backend", str, "inductor"),
]
FLOAT8, MX = "quantize.linear.float8", "quantize.linear.mx"
GROUPED_FLOAT8, GROUPED_MX = "quantize.grouped_mm.float8", "quantize.grouped_mm.mx"
QUANTIZE = [
    part(f"{FLOAT8}.enable_fsdp_float8_all_gather", bool, False),
    part(f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp", bool, False),
    part(f"{FLOAT8}.recipe_name", str, None),
    part(f"{FLOAT8}.filter_fqns", (list, str), []),
    part(f"{FLOAT8}.emulate", bool, False),
    part(f"{MX}.mxfp8_dim1_cast_kernel_choice", str, "triton"),
    part(f"{MX}.recipe_name", str, "mxfp8_cublas"),
    part(f"{MX}.filter_fqns", (list, str), ["output"]),
    part(f"{GROUPED_FLOAT8}.fqns", (list, str), []),
    part(f"{GROUPED_MX}.recipe_name", str, "mxfp8"),
    part(f"{GROUPED_MX}.fqns", (list, str), []),
]
COMM = [
    carried("comm.init_timeout_seconds", int, 300),
    carried("comm.train_timeout_seconds", int, 100),
    carried("comm.trace_buf_size", int, 20000),
    dropped("comm.save_traces_folder", str, "comm_traces", "the flight recorder writes to the run folder"),
    dropped("comm.save_traces_file_prefix", str, "rank_", "the flight recorder chooses its own file names"),
    dropped(
        "comm.mode", str, "default", "`titan plan RECIPE --world-size N --check` simulates a run's ranks"
    ),
]
OTHERS = [
    dropped("memory_estimation.enable", bool, False, "`titan plan RECIPE --world-size N` estimates memory"),
    dropped(
        "memory_estimation.disable_fake_mode",
        bool,
        False,
        "`titan plan RECIPE --world-size N` estimates memory",
    ),
    dropped("fault_tolerance.enable", bool, False, _FAULT),
    dropped("fault_tolerance.process_group", str, "gloo", _FAULT),
    dropped("fault_tolerance.process_group_timeout_ms", int, 10000, _FAULT),
    dropped("fault_tolerance.replica_id", int, 0, _FAULT),
    dropped("fault_tolerance.group_size", int, 0, _FAULT),
    dropped("fault_tolerance.min_replica_size", int, 1, _FAULT),
    dropped("fault_tolerance.semi_sync_method", str, None, _FAULT),
    dropped(
        "experimental.custom_import",
        str,
        "",
        "provide in a plugin what the module registers: `titan plugin list`",
    ),
    dropped(
        "experimental.custom_args_module", str, "", "a recipe runs no code; provide its settings in a plugin"
    ),
]
VALIDATION = [
    part("validation.enable", bool, False),
    part("validation.dataset", str, "c4_validation"),
    part("validation.dataset_path", str, None),
    part("validation.local_batch_size", int, 8),
    part("validation.seq_len", int, 2048),
    part("validation.freq", int, 10),
    part("validation.steps", int, -1),
    *_loader("validation.dataloader"),
]
DEBUG = [
    carried("debug.seed", int, None, "training.seed"),
    carried("debug.deterministic", bool, False),
    dropped(
        "debug.deterministic_warn_only",
        bool,
        False,
        "debug.deterministic raises where torch has no deterministic op",
    ),
    carried("debug.moe_force_load_balance", bool, False),
]
FIELDS: dict[str, Field] = {
    field.name: field
    for field in [
        *JOB,
        *_profiling(),
        *METRICS,
        *MODEL,
        *OPTIMIZER,
        *SCHEDULE,
        *TRAINING,
        *PARALLELISM,
        *CHECKPOINT,
        *ACTIVATION_CHECKPOINT,
        *COMPILE,
        *QUANTIZE,
        *COMM,
        *OTHERS,
        *VALIDATION,
        *DEBUG,
    ]
}
"""All fields by name."""
