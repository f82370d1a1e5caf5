"""Every key of an axolotl config, and what becomes of it; defaults are those of axolotl's schemas, and of
transformers where they say None."""

from __future__ import annotations

from titan_migrate.keys import FLAG, LIST, NUMBER, TEXT, WHOLE, Key, carried, dropped, gone, idle, part, table
from titan_migrate.trainer import fsdp_names

FOLDER = "the run folder is set on the command line: titan train RECIPE --run-dir DIR"
KERNELS = "titan chooses kernels by the device"
HUB = "`titan hub push RUN OWNER/NAME` of the plugin titan-hub pushes a model"
TOKENIZER = "the tokenizer is that of the model's folder"
CACHE = "titan keeps what it prepares in its cache"
TEXT_ONLY = "titan trains on text"
METHOD = "titan has no such method: leave it out, or bring it in a plugin"
TEMPLATE = "the chat template of the folder's tokenizer is used: `titan data show` prints the rows"
QLORA = "the converter `qlora`, if it is installed"
FLAG_OR_TEXT = (bool, str)

MODEL = [
    part("base_model", TEXT, None, "`weights` and `tokenizer.path`"),
    *idle("base_model_config tokenizer_config model_type tokenizer_type tokenizer_use_fast tokenizer_legacy "
          "processor_type is_falcon_derived_model is_llama_derived_model is_mistral_derived_model "
          "is_qwen_derived_model type_of_model processor_kwargs processor_kwargs.* "
          "tokenizer_save_jinja_files "
          "tokenizer_use_mistral_common base_model_ignore_patterns low_cpu_mem_usage device_map device_map.* "
          "experimental_skip_move_to_device model_quantization_config model_quantization_config_kwargs.* "
          "max_memory.* gpu_memory_limit device local_rank world_size torchdistx_path",
          "the folder is read as it is"),
    dropped("revision_of_model", TEXT, "download that revision: hf download OWNER/NAME --revision REVISION"),
    dropped("trust_remote_code", FLAG, "no code of a model's folder is run: its model_type must be "
                                       "known", False),
    *gone("overrides_of_model_config.* overrides_of_model_kwargs.* model_config.* rope_scaling "
          "rope_scaling.* cls_model_config reinit_weights", "the model is what its config.json says: "
                                                            "change that"),
    *gone("special_tokens.* tokens tokens.* added_tokens_overrides.* resize_token_embeddings_to_32x "
          "mean_resizing_embeddings shrink_embeddings fix_untrained_tokens",
          "tokens and vocabulary are those of the folder: change its tokenizer, and save the model with it"),
    *idle("special_tokens special_tokens.pad_token embeddings_skip_upcast", TOKENIZER),
    *gone("chat_template chat_template_jinja chat_template_kwargs.* default_system_message", TEMPLATE),
    *idle("eot_tokens", "the end marker of a turn is the template's"),
    *gone("freeze_mm_modules", TEXT_ONLY),
]  # fmt: skip
ADAPTERS = [
    part("adapter", TEXT, None, "`[[converters]]`: `lora`, or `qlora`"),
    part("load_in_4bit", FLAG, False, QLORA),
    part("load_in_8bit", FLAG, False, "none: the base is trained with in 16 bits"),
    part("lora_r", WHOLE, 8, "`converters.0.rank`"),
    part("lora_alpha", WHOLE, 8, "`converters.0.alpha`"),
    part("lora_dropout", NUMBER, 0.0, "none: titan's adapters have no dropout"),
    part("lora_target_modules", (str, list), None, "`converters.0.targets`"),
    part("lora_target_linear", FLAG, None, "`converters.0.targets`, left out: all linear layers of the "
                                           "blocks"),
    dropped("lora_target_parameters", (str, list), 'name experts in converters.0.targets: "experts.*"'),
    part("peft_use_rslora", FLAG, False, "`converters.0.rslora`"),
    part("peft_use_dora", FLAG, False, "`converters.0.dora`"),
    part("loraplus_lr_ratio", NUMBER, None, "the optimizer `by_name` of titan-optimizers"),
    part("loraplus_lr_embedding", NUMBER, 1e-6, "the optimizer `by_name` of titan-optimizers"),
    *gone("lora_modules_to_save lora_rank_pattern.* lora_alpha_pattern.* "
          "peft_layers_to_transform peft_layers_pattern peft_layer_replication peft_init_lora_weights "
          "peft_trainable_token_indices peft_ensure_weight_tying lora_exclude_modules peft.* lora_model_dir",
          "titan's adapters have no such setting: all other weights stay as they are"),
    *idle("lora_fan_in_fan_out lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
          "lora_on_cpu "
          "qlora_sharded_model_loading peft_autocast_adapter_dtype quantize_moe_experts merge_lora "
          "merge_method "
          "bnb_config_kwargs.*", KERNELS),
    *gone("relora relora_* jagged_restart_* gptq gptq_* lisa_* use_onebitllms unfrozen_parameters", METHOD),
]  # fmt: skip
DATA = [
    part("sequence_len", WHOLE, 512, "`training.seq_len`"),
    part("sample_packing", FLAG, False, "`dataset.pack`"),
    part("pad_to_sequence_len", FLAG, None, "`dataset.padding`"),
    part("excess_length_strategy", TEXT, "drop", "`dataset.too_long`"),
    part("train_on_inputs", FLAG, False, "`dataset.train_on`"),
    part("val_set_size", NUMBER, 0.0, "`[validation.datasets.validation]`, and `split`"),
    part("datasets.*.path", TEXT, None, "`dataset.path`; several data sets: a `concat`"),
    part("datasets.*.type", (str, dict), None, "`dataset.type` and `format`"),
    part("datasets.*.split", TEXT, "train", "`dataset.split`"),
    part("datasets.*.name", TEXT, None, "`dataset.name`"),
    part("datasets.*.revision", TEXT, None, "`dataset.revision`"),
    part("datasets.*.data_files", (str, list), None, "`dataset.path`"),
    part("datasets.*.field", TEXT, "text", "`dataset.text`"),
    part("datasets.*.field_messages", TEXT, "messages", "`dataset.fields`"),
    part("datasets.*.message_property_mappings.role", TEXT, "role", "`dataset.format` and `fields`"),
    part("datasets.*.message_property_mappings.content", TEXT, "content", "`dataset.format` and `fields`"),
    part("datasets.*.message_field_role", TEXT, "role", "`dataset.format` and `fields`"),
    part("datasets.*.message_field_content", TEXT, "content", "`dataset.format` and `fields`"),
    part("datasets.*.roles.*", LIST, None, "`dataset.roles`"),
    part("datasets.*.roles_to_train", LIST, ["assistant"], "`dataset.train_on`"),
    part("datasets.*.field_chosen", TEXT, "chosen", "`dataset.fields`"),
    part("datasets.*.field_rejected", TEXT, "rejected", "`dataset.fields`"),
    part("datasets.*.field_tools", TEXT, "tools", "`dataset.fields`"),
    *idle("datasets.*.ds_type", "titan finds out what a file holds"),
    dropped("datasets.*.train_on_eos", TEXT, "end markers of the assistant's turns are trained on", "turn"),
    dropped("datasets.*.train_on_eot", TEXT, "end markers of the assistant's turns are trained on", "turn"),
    *gone("datasets.*.chat_template datasets.*.chat_template_jinja", TEMPLATE, "tokenizer_default"),
    dropped("datasets.*.trust_remote_code", FLAG, "no code of a data set is run", False),
    *gone("datasets.*", "titan's data sets have no such setting: change the rows in advance"),
    part("pretraining_dataset", (str, list), None, "`dataset`, streamed"),
    part("pretraining_dataset.*.path", TEXT, None, "`dataset.path`"),
    part("pretraining_dataset.*.name", TEXT, None, "`dataset.name`"),
    part("pretraining_dataset.*.split", TEXT, "train", "`dataset.split`"),
    part("pretraining_dataset.*.text_column", TEXT, "text", "`dataset.text`"),
    part("pretraining_dataset.*.field", TEXT, "text", "`dataset.text`"),
    *gone("pretraining_dataset.*", "titan's data sets have no such setting"),
    *idle("pretraining_dataset.*.type streaming", "documents are read as text"),
    part("test_datasets.*.path", TEXT, None, "`[validation.datasets.validation]`"),
    *idle("test_datasets.*", "as those of `datasets`"),
    *idle("dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory "
          "skip_prepare_dataset "
          "push_dataset_to_hub remove_unused_columns num_dataset_shards_to_save preprocess_iterable "
          "is_preprocess "
          "total_num_tokens total_supervised_tokens sample_packing_* pretrain_multipack_* "
          "streaming_multipack_* "
          "strict eval_sample_packing pad_to_multiple_of multipack_real_batches shuffle_merged_datasets "
          "dataloader_* accelerator_config.* hf_use_auth_token batch_flattening group_by_length", CACHE),
    *gone("dataset_exact_deduplication dataset_shard_num dataset_shard_idx min_sample_len max_prompt_len "
          "curriculum_sampling shuffle_before_merging_datasets eval_sequence_len max_packed_sequence_len "
          "pretraining_sample_concatenation", "titan takes the rows as they are: change them in advance"),
]  # fmt: skip
TRAINING = [
    part("micro_batch_size", WHOLE, 1, "`training.local_batch_size`"),
    part("gradient_accumulation_steps", WHOLE, 1, "`training.global_batch_size`"),
    part("batch_size", WHOLE, None, "`training.global_batch_size`"),
    part("eval_batch_size", WHOLE, None, "`validation.local_batch_size`"),
    part("num_epochs", NUMBER, 1.0, "`training.epochs`"),
    part("max_steps", WHOLE, None, "`training.steps`"),
    part("learning_rate", (float, int, str), 1e-4, "`optimizer.lr`"),
    part("optimizer", TEXT, "adamw_torch_fused", "`optimizer.type`"),
    part("weight_decay", NUMBER, 0.0, "`optimizer.weight_decay`, always written; not of norms"),
    part("adam_beta1", NUMBER, 0.9, "`optimizer.beta1`"),
    part("adam_beta2", NUMBER, 0.999, "`optimizer.beta2`, always written"),
    part("adam_epsilon", NUMBER, 1e-8, "`optimizer.eps`"),
    *gone("adam_eps optim_args optim_args.* adam_epsilon2 adam_beta3 optim_target_modules embedding_lr "
          "embedding_lr_scale lr_groups lr_groups.* dion_* qgalore_* lr_div_factor",
          "titan's optimizers have no such setting (rates by name: the optimizer by_name)"),
    part("lr_scheduler", TEXT, "cosine", "`lr_scheduler`"),
    part("lr_scheduler_kwargs.min_lr_rate", NUMBER, None, "`lr_scheduler.min_lr_factor`"),
    part("lr_scheduler_kwargs.min_lr", NUMBER, None, "`lr_scheduler.min_lr_factor`"),
    *gone("lr_scheduler_kwargs.* eta_min", "set lr_scheduler.min_lr_factor"),
    part("cosine_min_lr_ratio", NUMBER, None, "`lr_scheduler.min_lr_factor`"),
    part("cosine_constant_lr_ratio", NUMBER, None, "`lr_scheduler.decay_until`"),
    part("lr_quadratic_warmup", FLAG, None, "`lr_scheduler.warmup_power`"),
    part("warmup_steps", NUMBER, None, "`lr_scheduler.warmup_steps`"),
    part("warmup_ratio", NUMBER, None, "`lr_scheduler.warmup_ratio`; without either, 3 % and at most "
                                       "100 steps"),
    part("max_grad_norm", NUMBER, None, "`training.max_norm`, 1.0 by default"),
    carried("seed", WHOLE, 42, "training.seed"),
    part("bf16", FLAG_OR_TEXT, None, "`training.mixed_precision_param`, `training.dtype`"),
    part("bfloat16", FLAG, None, "as `bf16`"),
    part("fp16", FLAG, None, "none: titan has no float16"),
    part("float16", FLAG, None, "none: titan has no float16"),
    *idle("float32 torch_dtype tf32 fp32_norms fp32_norm_classes", KERNELS),
    part("fp8", FLAG, None, "the converter `float8_linear` of titan-float8"),
    *idle("fp8_enable_fsdp_float8_all_gather", "a setting of float8_linear"),
    part("gradient_checkpointing", FLAG_OR_TEXT, None, "`activation_checkpoint.mode`"),
    *idle("gradient_checkpointing_kwargs.*", "titan recomputes without reentrance"),
    part("activation_offloading", FLAG_OR_TEXT, None, "the callback `activation_offload` of titan-offload"),
    *gone("layer_offloading selective_checkpointing selective_checkpointing.*",
          "activations are recomputed, not moved: activation_checkpoint.mode"),
    part("neftune_noise_alpha", NUMBER, None, "the converter `neftune` of titan-optimizers"),
    part("torch_compile", FLAG_OR_TEXT, False, "`compile.enable`"),
    *idle("torch_compile_* flex_attn_compile_kwargs.*", "titan compiles block by block"),
    part("early_stopping_patience", WHOLE, None, "the callback `early_stop`"),
]  # fmt: skip
METHODS = [
    part("rl", TEXT, None, "`loop`, `loss` and `dataset.type`"),
    part("rl_beta", NUMBER, None, "`loss.beta`"),
    part("orpo_alpha", NUMBER, 0.1, "`loss.beta`"),
    part("simpo_gamma", NUMBER, None, "`loss.gamma`"),
    part("kto_desirable_weight", NUMBER, 1.0, "`loss.desirable_weight`"),
    part("kto_undesirable_weight", NUMBER, 1.0, "`loss.undesirable_weight`"),
    part("dpo_label_smoothing", NUMBER, 0.0, "`loss.label_smoothing`"),
    part("cpo_alpha", NUMBER, 1.0, "none: titan's simpo is without cross-entropy"),
    part("reward_model", FLAG, None, "the loss `reward` of titan-heads"),
    part("center_rewards_coefficient", NUMBER, 0.0, "`loss.center`"),
    dropped("num_labels", WHOLE, "classes are named: the loss classification of titan-heads", None, (1,)),
    part("trl.beta", NUMBER, None, "`loss.kl_coef`"),
    *gone("trl.* vllm.* ebft.* process_reward_model dpo_* precompute_ref_log_probs trainer_cls "
          "rpo_alpha diffusion.* nemo_gym* hatchery* generate_samples generation_* num_generation_samples",
          "set the loop grpo or dpo by hand: `titan recipe new FILE --from-hf FOLDER --grpo DATA`"),
    *gone("qat.* quantization.* llmcompressor.* nvfp4_merge_aware use_eaft eaft_* use_pose pose_* tiled_mlp "
          "tiled_mlp_* scaling_softmax* noisy_embedding_alpha s2_attention kd_*", METHOD),
    *gone("plugins", "titan's own: `titan plugin list`; kernels of Liger and Cut Cross Entropy are not "
                     "needed"),
]  # fmt: skip
PARALLEL = [
    part("deepspeed", (str, dict), None, "`[parallelize]` and `[mesh]`, by the stage in its name or file"),
    *idle("deepspeed.* deepcompile", "FSDP2 takes the place of DeepSpeed"),
    part("fsdp", (list, bool, str), None, "the plan `decoder` shards by FSDP2"),
    part("fsdp_config.reshard_after_forward", FLAG_OR_TEXT, None, "`parallelize.reshard_after_forward`"),
    part("fsdp_config.fsdp_reshard_after_forward", FLAG_OR_TEXT, None, "`parallelize.reshard_after_forward`"),
    part("fsdp_config.offload_params", FLAG, False, "`parallelize.cpu_offload`"),
    part("fsdp_config.fsdp_offload_params", FLAG, False, "`parallelize.cpu_offload`"),
    *idle(f"{fsdp_names()} fsdp_config.* fsdp_version fsdp_final_state_dict_type ddp ddp_*",
          "the plan `decoder` shards by FSDP2"),
    part("dp_shard_size", WHOLE, None, "`mesh.dp_shard`"),
    part("dp_replicate_size", WHOLE, None, "`mesh.dp_replicate`"),
    part("context_parallel_size", WHOLE, None, "`mesh.cp`"),
    part("sequence_parallel_degree", WHOLE, None, "`mesh.cp`"),
    part("tensor_parallel_size", WHOLE, None, "`mesh.tp`"),
    part("expert_parallel_size", WHOLE, None, "`mesh.ep`"),
    *idle("expert_parallel_* heads_k_stride ring_attn_func timeout ddp_timeout use_ray ray_*", "titan's "
                                                                                               "own layouts"),
    *idle("flash_attention xformers_attention sdp_attention flex_attention eager_attention sage_attention "
          "attn_implementation flash_attn_* flash_optimum fused_attn_kernel gemma4_hybrid_attn_impl "
          "large_head_attention sdpa_varlen experts_implementation liger_* cut_cross_entropy "
          "chunked_cross_entropy* use_kernels use_scattermoe use_sonicmoe use_dsv4_kernels "
          "use_glm_dsa_kernels "
          "dsv4_fp4_grouped_mode llama4_linearized_experts torch_empty_cache_steps gc_steps gc_collect_steps",
          KERNELS),
]  # fmt: skip
WATCHING = [
    Key("output_dir", TEXT, why=FOLDER, idle=True),
    part("logging_steps", NUMBER, None, "`metrics.log_freq`"),
    part("save_steps", NUMBER, None, "`checkpoint.interval`"),
    part("saves_per_epoch", NUMBER, None, "`checkpoint.interval`, if the steps are known"),
    part("save_strategy", TEXT, None, "`checkpoint.interval`"),
    part("save_total_limit", WHOLE, None, "`checkpoint.keep_latest_k`, 4 by default"),
    part("eval_steps", NUMBER, None, "`validation.freq`"),
    part("evals_per_epoch", NUMBER, None, "`validation.freq`, if the steps are known"),
    part("eval_strategy", TEXT, None, "`validation.freq`"),
    part("evaluation_strategy", TEXT, None, "`validation.freq`"),
    *gone("eval_table_size eval_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics do_bench_eval "
          "bench_* "
          "metric_for_best_model greater_is_better load_best_model_at_end",
          "evaluations compute losses; the callback `best` keeps the best checkpoint, `titan lm-eval` "
          "runs tasks", 0),
    *gone("loss_watchdog_threshold loss_watchdog_patience", "[stability] skips bad steps, and ends a "
                                                            "run of them"),
    part("save_first_step", FLAG, None, "`checkpoint.enable_first_step_checkpoint`"),
    *idle("save_only_model save_safetensors", "a checkpoint holds the whole state, in safetensors"),
    *gone("resume_from_checkpoint auto_resume_from_checkpoints", "titan train RUN --resume"),
    *gone("hub_model_id hub_strategy hub_revision", HUB),
    part("use_wandb", FLAG, None, "`[[loggers]]` with `type = \"wandb\"` (plugin titan-wandb)"),
    part("wandb_project", TEXT, None, "`loggers.0.project`"),
    part("wandb_entity", TEXT, None, "`loggers.0.entity`"),
    *gone("wandb_name wandb_run_id wandb_watch wandb_log_model wandb_mode", "a run is named by its folder"),
    part("use_tensorboard", FLAG, None, "`[[loggers]]` with `type = \"tensorboard\"`"),
    part("use_trackio", FLAG, None, "`[[loggers]]` with `type = \"trackio\"` (plugin titan-trackio)"),
    *gone("trackio_* use_mlflow mlflow_* use_comet comet_* use_swanlab swanlab_* use_otel_metrics otel_*",
          "titan's loggers: csv, tensorboard, wandb, trackio"),
    *idle("profiler_steps profiler_steps_start include_tokens_per_second include_tkps",
          "tokens per second are logged; `titan profile RUN` records traces"),
    *idle("debug axolotl_config_path dynamic_checkpoint.* project_name full_finetune test_value",
          "nothing to set"),
]  # fmt: skip
KEYS = table(MODEL, ADAPTERS, DATA, TRAINING, METHODS, PARALLEL, WATCHING)
"""All keys by name."""
