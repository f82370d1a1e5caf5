"""Every key of a torchtune training config, and what becomes of it. torchtune's recipes define no defaults in
one place: they are those of its recipes (`cfg.get`) and of the functions that `_component_` names."""

from __future__ import annotations

from titan_migrate.keys import ANY, FLAG, LIST, NUMBER, TEXT, WHOLE, Key, dropped, gone, idle, part, table

RUN = "titan train RECIPE --run-dir DIR"
FOLDER = f"the run folder is set on the command line: {RUN}"
EXPORT = "a run's checkpoints are in its folder; checkpoint.last_save_in_hf leaves a Hugging Face folder"
ON_POLICY = (
    "titan's loop grpo samples, scores and trains: `titan recipe new FILE --from-hf FOLDER --grpo DATA`"
)
IMAGES = "titan trains on text: images are no input of its models"


def _dataset(name: str, what: str) -> list[Key]:
    at = [f"{name}.", f"{name}.*."]
    keys = []
    for prefix in at:
        keys += [
            part(f"{prefix}_component_", TEXT, None, f"`{what}.type`, `format` and `fields`"),
            part(f"{prefix}source", TEXT, None, f"`{what}.path`"),
            part(f"{prefix}data_files", (str, list), None, f"`{what}.path`"),
            part(f"{prefix}data_dir", TEXT, None, "none: give the folder in `path`"),
            part(f"{prefix}split", TEXT, "train", f"`{what}.split`"),
            part(f"{prefix}subset", TEXT, None, f"`{what}.name`"),
            part(f"{prefix}name", TEXT, None, f"`{what}.name`"),
            part(f"{prefix}revision", TEXT, None, f"`{what}.revision`"),
            part(f"{prefix}packed", FLAG, False, f"`{what}.pack`, or `packing` of text"),
            part(f"{prefix}train_on_input", FLAG, None, f"`{what}.train_on`"),
            part(f"{prefix}column_map.*", TEXT, None, f"`{what}.fields`"),
            part(f"{prefix}conversation_column", TEXT, None, f"`{what}.fields.messages`"),
            part(f"{prefix}conversation_style", TEXT, None, f"`{what}.format`"),
            part(f"{prefix}column", TEXT, "text", f"`{what}.text`"),
            part(f"{prefix}add_eos", FLAG, True, f"`{what}.add_eos`"),
            part(f"{prefix}max_seq_len", WHOLE, None, "`training.seq_len`, if the tokenizer has none"),
            dropped(f"{prefix}split_across_pack", FLAG, "set dataset.packing: stream, or best_fit", True),
            dropped(f"{prefix}new_system_prompt", TEXT, "give rows a field `system`: dataset.fields"),
            dropped(f"{prefix}filter_fn", ANY, "a recipe runs no code: filter the rows in advance"),
            dropped(f"{prefix}weight", NUMBER, "weights are those of a mix: dataset.weights", None, (1.0,)),
            dropped(f"{prefix}partition", TEXT, "give the rows by dataset.split, as in train[:90%]"),
            *gone(f"{prefix}transform.* {prefix}image_dir {prefix}image_tag", IMAGES),
        ]
    return keys


MODEL = [
    part("checkpointer.checkpoint_dir", TEXT, None, "`weights` and `tokenizer.path`"),
    *idle(
        "checkpointer._component_ checkpointer.checkpoint_files checkpointer.checkpoint_files.* "
        "checkpointer.model_type checkpointer.safe_serialization",
        "the folder is read as it is",
    ),
    *gone("checkpointer.adapter_checkpoint checkpointer.recipe_checkpoint", EXPORT),
    Key("checkpointer.output_dir", TEXT, why=FOLDER, idle=True),
    part("checkpointer.keep_last_n_checkpoints", WHOLE, None, "`checkpoint.keep_latest_k`"),
    Key("output_dir", TEXT, why=FOLDER, idle=True),
    part("model._component_", TEXT, None, "the model is that of `weights`; `lora_…`: a converter"),
    part("model.lora_attn_modules", LIST, None, "`converters.0.targets`"),
    part("model.apply_lora_to_mlp", FLAG, False, "`converters.0.targets`"),
    part("model.apply_lora_to_output", FLAG, False, "`converters.0.targets`"),
    part("model.lora_rank", WHOLE, 8, "`converters.0.rank`"),
    part("model.lora_alpha", NUMBER, 16, "`converters.0.alpha`"),
    part("model.lora_dropout", NUMBER, 0.0, "none: titan's adapters have no dropout"),
    part("model.use_dora", FLAG, False, "`converters.0.dora`"),
    part("model.quantize_base", FLAG, False, "the converter `qlora`, if it is installed"),
    *idle(
        "model.vocab_size model.num_layers model.num_heads model.num_kv_heads model.embed_dim "
        "model.intermediate_dim model.max_seq_len model.attn_dropout model.norm_eps",
        "the folder's config.json has it",
    ),
    *gone("model.decoder_trainable model.encoder_trainable model.fusion_trainable model.image_size", IMAGES),
    *idle("tokenizer._component_ tokenizer.path tokenizer.merges_file tokenizer.merges_path "
          "tokenizer.vocab_path tokenizer.special_tokens_path",
          "the tokenizer is that of the model's folder"),
    part("tokenizer.max_seq_len", WHOLE, None, "`training.seq_len`"),
    dropped("tokenizer.prompt_template", ANY, "the chat template of the folder's tokenizer is used"),
    *gone("tokenizer.image_size tokenizer.max_num_tiles", IMAGES),
]  # fmt: skip
DATA = [
    *_dataset("dataset", "dataset"),
    *_dataset("datasets", "dataset"),
    *_dataset("dataset_val", "validation.datasets.validation"),
    part("shuffle", FLAG, True, "`dataset.shuffle`"),
    part("seed", WHOLE, None, "`training.seed`; there, none means a random one"),
    part("batch_size", WHOLE, 1, "`training.local_batch_size`"),
    part("batch_size_val", WHOLE, None, "`validation.local_batch_size`"),
    part("run_val_every_n_steps", WHOLE, None, "`validation.freq`"),
    *idle("collate_fn dataloader.*", "titan makes the batches"),
]
OPTIMIZER = [
    part("optimizer._component_", TEXT, "torch.optim.AdamW", "`optimizer.type`"),
    part("optimizer.lr", NUMBER, 1e-3, "`optimizer.lr`"),
    part("optimizer.weight_decay", NUMBER, 0.01, "`optimizer.weight_decay`, always written"),
    part("optimizer.betas", LIST, [0.9, 0.999], "`optimizer.beta1` and `beta2`, always written"),
    part("optimizer.eps", NUMBER, 1e-8, "`optimizer.eps`"),
    *idle("optimizer.fused optimizer.foreach", "titan chooses torch's implementation"),
    part("optimizer_in_bwd", FLAG, False, "none: the optimizer steps once"),
    part("lr_scheduler._component_", TEXT, None, "`lr_scheduler`; without one the rate is constant"),
    part("lr_scheduler.num_warmup_steps", WHOLE, 0, "`lr_scheduler.warmup_steps`"),
    dropped("lr_scheduler.num_cycles", NUMBER, "a cosine ends once, at the last step", 0.5),
    part("clip_grad_norm", NUMBER, None, "`training.max_norm`; 0 if there is none"),
]
TRAINING = [
    part("epochs", WHOLE, 1, "`training.epochs`"),
    part("max_steps_per_epoch", WHOLE, None, "`training.steps`, times the epochs"),
    part("num_steps", WHOLE, None, "`training.steps`"),
    part("gradient_accumulation_steps", WHOLE, 1, "`training.global_batch_size`"),
    part("dtype", TEXT, "bf16", "`training.dtype` and `mixed_precision_param`"),
    part("enable_fp8_training", FLAG, False, "the converter `float8_linear` of titan-float8"),
    *idle("fp8_recipe_name", "`converters.0.recipe`"),
    part("compile", (bool, dict), False, "`compile.enable`"),
    *idle("compile.*", "compile.components says what is compiled"),
    part("enable_activation_checkpointing", FLAG, False, "`activation_checkpoint.mode`"),
    part("ac_mode", TEXT, None, "`activation_checkpoint.mode`"),
    part("ac_option", (int, str), None, "`activation_checkpoint.selective_ac_option`"),
    part("enable_activation_offloading", FLAG, False, "the callback `activation_offload` of titan-offload"),
    *idle("activation_offloading_use_streams", "copies always have streams of their own"),
    part("loss._component_", TEXT, None, "`loss.type`"),
    part("loss.beta", NUMBER, 0.1, "`loss.beta`"),
    part("loss.label_smoothing", NUMBER, 0.0, "`loss.label_smoothing`"),
    *idle("loss.num_output_chunks loss.mask_pre_projection", "titan chooses the chunks of the loss"),
    *gone("loss.*", ON_POLICY),
    part("kd_loss._component_", TEXT, None, "`loss.type = \"distil\"`"),
    *idle("kd_loss.num_output_chunks", "titan chooses the chunks of the loss"),
    part("kd_ratio", NUMBER, 0.5, "`loss.sft_weight`: 1 - kd_ratio"),
    part("teacher_checkpointer.checkpoint_dir", TEXT, None, "`loop.teacher.weights`"),
    *idle("teacher_checkpointer.* teacher_model.*", "the teacher's folder is read as it is"),
    part("ref_checkpointer.checkpoint_dir", TEXT, None, "none: the reference is the initial model"),
    *idle("ref_checkpointer.*", "the reference is the initial model"),
    part("quantizer._component_", TEXT, None, "none: titan trains without simulated int4"),
    *idle("quantizer.* fake_quant_after_n_steps", "quantization is not simulated"),
]  # fmt: skip
PARALLEL = [
    part("tensor_parallel_dim", WHOLE, 1, "`mesh.tp`"),
    part("context_parallel_dim", WHOLE, 1, "`mesh.cp`"),
    part("data_parallel_shard_dim", WHOLE, -1, "`mesh.dp_shard`"),
    part("data_parallel_replicate_dim", WHOLE, 1, "`mesh.dp_replicate`"),
    part("fsdp_cpu_offload", FLAG, False, "`parallelize.cpu_offload`"),
    part("fsdp.cpu_offload", FLAG, False, "`parallelize.cpu_offload`"),
    part("fsdp_reshard_after_forward", FLAG, True, "`parallelize.reshard_after_forward`"),
    *idle("tensor_parallel_plan.* custom_sharded_layers memory_efficient_fsdp_wrap fsdp.*",
          "the plan `decoder` shards each block"),
    *idle("use_distributed_state_dict low_cpu_ram use_flex", "titan's checkpoints and kernels need no "
                                                             "setting"),
    *idle("enable_async_checkpointing", "checkpoint.async_mode"),
]  # fmt: skip
WATCHING = [
    part("metric_logger._component_", TEXT, None, "`[[loggers]]`"),
    part("metric_logger.project", TEXT, None, "`loggers.0.project`"),
    *idle("metric_logger.*", "metrics are in the run folder"),
    part("log_every_n_steps", WHOLE, 1, "`metrics.log_freq`"),
    *idle("log_peak_memory_stats log_level", "titan logs peak memory with each step"),
    part("profiler.enabled", FLAG, False, "`profiling.enable_profiling`"),
    part("profiler.active_steps", WHOLE, 2, "`profiling.profiler_active`"),
    part("profiler.warmup_steps", WHOLE, 3, "`profiling.profiler_warmup`"),
    *idle("profiler.* profile_memory", "titan's traces need no further setting"),
    part("save_every_n_steps", WHOLE, None, "`checkpoint.interval`"),
    part("save_every_n_epochs", WHOLE, None, "`checkpoint.interval`, in steps"),
    dropped("resume_from_checkpoint", (bool, str), "titan train RUN --resume", False),
    part("save_adapter_weights_only", FLAG, False, "checkpoints of adapters always hold only them"),
    *idle("device", "titan uses the GPUs that are there"),
    part("cudnn_deterministic_mode", (bool, int, str), None, "`debug.deterministic`"),
    part("resize_token_embeddings", FLAG, False, "none: the folder's vocabulary is used"),
]
OTHERS = [
    *gone(
        "base_model_path name orchestration.* inference.* postprocessing.* training.* reward_functions.* "
        "grpo_samples forward_batch_size max_generated_tokens temperature top_k ppo_epochs ppo_batch_size "
        "stop_token_ids num_processes debug_logging_enabled debug_num_samples_per_step enable_kv_cache",
        ON_POLICY,
    ),
    *gone(
        "min_response_length penalise_no_eos reward_penalty gamma lmbda kl_coeff whiten_rewards", ON_POLICY
    ),
    *gone(
        "policy_model.* reward_and_value_model.* ref_policy_checkpointer.* value_checkpointer.* "
        "reward_checkpointer.*",
        ON_POLICY,
    ),
]
KEYS = table(MODEL, DATA, OPTIMIZER, TRAINING, PARALLEL, WATCHING, OTHERS)
"""All keys by name."""
