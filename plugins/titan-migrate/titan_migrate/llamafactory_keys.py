"""Every key of a LLaMA-Factory config, and what becomes of it; defaults are those of its arguments, and of
transformers' TrainingArguments."""

from __future__ import annotations

from titan_migrate.keys import FLAG, NUMBER, TEXT, WHOLE, Key, carried, dropped, gone, idle, part, table
from titan_migrate.trainer import fsdp_names

FOLDER = "the run folder is set on the command line: titan train RECIPE --run-dir DIR"
TEXT_ONLY = "titan trains on text: images, video and sound are no input of its models"
METHOD = "titan has no such method: leave it out, or bring it in a plugin"
TEMPLATE = "the chat template of the folder's tokenizer is used: `titan data show` prints the rows"
EXPORT = "`titan convert-checkpoint RUN OUT --to hf`, or `--to peft`, writes a folder"
LAYOUT = "set the layout in [mesh]"
KT = "titan has no KTransformers: parallelize.cpu_offload keeps weights and state in CPU memory"

MODEL = [
    part("model_name_or_path", TEXT, None, "`weights` and `tokenizer.path`"),
    dropped("adapter_name_or_path", TEXT, "weights = RUN/checkpoints/step-N goes on from adapters of titan"),
    dropped("model_revision", TEXT, "download that revision: hf download OWNER/NAME --revision "
                                    "REVISION", "main"),
    dropped("trust_remote_code", FLAG, "no code of a model's folder is run: its model_type must be "
                                       "known", False),
    *gone("rope_scaling train_from_scratch moe_aux_loss_coef resize_vocab add_tokens add_special_tokens "
          "new_special_tokens_config", "the model is what its folder says: change that"),
    *idle("use_fast_tokenizer cache_dir low_cpu_mem_usage split_special_tokens init_special_tokens "
          "hf_hub_token "
          "ms_hub_token om_hub_token print_param_status offload_folder use_kv_cache infer_dtype device_map "
          "use_cache", "the folder is read as it is"),
    *idle("flash_attn enable_liger_kernel use_unsloth use_unsloth_gc use_reentrant_gc use_v1_kernels "
          "gradient_checkpointing_kwargs.* upcast_layernorm upcast_lmhead_output use_liger_kernel",
          "titan chooses kernels by the device"),
    *gone("shift_attn mixture_of_depths", METHOD),
    *gone("use_kt kt_* kt_config.*", KT),
    *gone("image_* video_* audio_* use_audio_in_video crop_to_patches media_dir freeze_vision_tower "
          "freeze_multi_modal_projector freeze_language_model", TEXT_ONLY, True),
]  # fmt: skip
ADAPTERS = [
    part("finetuning_type", TEXT, "lora", "`[[converters]]` with `type = \"lora\"`; `full`: none"),
    part("lora_rank", WHOLE, 8, "`converters.0.rank`"),
    part("lora_alpha", WHOLE, None, "`converters.0.alpha`, twice the rank by default"),
    part("lora_dropout", NUMBER, 0.0, "none: titan's adapters have no dropout"),
    part("lora_target", (str, list), "all", "`converters.0.targets`"),
    part("use_rslora", FLAG, False, "`converters.0.rslora`"),
    part("use_dora", FLAG, False, "`converters.0.dora`"),
    part("loraplus_lr_ratio", NUMBER, None, "the optimizer `by_name` of titan-optimizers"),
    part("quantization_bit", WHOLE, None, "4: the converter `qlora`, if it is installed"),
    dropped("quantization_method", TEXT, "titan quantizes to NF4 itself", "bnb", ("bitsandbytes",)),
    dropped("quantization_type", TEXT, "titan quantizes to NF4", "nf4"),
    dropped("double_quantization", FLAG, "the scales are quantized, too", True),
    *idle("quantization_device_map", "titan shards the base"),
    part("loraplus_lr_embedding", NUMBER, 1e-6, "the optimizer `by_name` of titan-optimizers"),
    *gone("additional_target pissa_* create_new_adapter oft_* module_dropout "
          "freeze_trainable_* freeze_extra_modules use_llama_pro", METHOD),
]  # fmt: skip
DATA = [
    part("dataset", (str, list), None, "`dataset`, as dataset_info.json describes it; several: a `concat`"),
    part("eval_dataset", (str, list), None, "`[validation.datasets.validation]`"),
    part("dataset_dir", (str, dict), "data", "where dataset_info.json is looked for"),
    part("cutoff_len", WHOLE, 2048, "`training.seq_len`"),
    part("train_on_prompt", FLAG, False, "`dataset.train_on`"),
    part("packing", FLAG, None, "`dataset.pack`"),
    part("neat_packing", FLAG, False, "`dataset.pack`"),
    part("max_samples", WHOLE, None, "`dataset.split`, as in `train[:1000]`"),
    part("val_size", NUMBER, 0.0, "`[validation.datasets.validation]`, and `split`"),
    part("streaming", FLAG, False, "`dataset.streaming` of text; conversations are read whole"),
    part("mix_strategy", TEXT, "concat", "a `concat`, or with `interleave_probs` a `mix`"),
    part("interleave_probs", (str, list), None, "`dataset.weights`"),
    *gone("template tool_format default_system", TEMPLATE),
    *gone("mask_history eval_on_each_dataset", "all turns of the assistant are trained on"),
    dropped("enable_thinking", FLAG, "a row's `chat_template_kwargs` say so to the template", True),
    dropped("preserve_thinking", FLAG, "a row's `chat_template_kwargs` say so to the template", False),
    *idle("overwrite_cache preprocessing_batch_size preprocessing_num_workers tokenized_path buffer_size "
          "data_shared_file_system ignore_pad_token_for_loss eval_num_beams dataloader_* "
          "remove_unused_columns "
          "group_by_length", "titan keeps what it prepares in its cache"),
    *idle("disable_shuffling", "dataset.shuffle"),
]  # fmt: skip
TRAINING = [
    part("stage", TEXT, "sft", "`loop`, `loss` and `dataset.type`"),
    *idle("do_train do_eval", "titan train trains, and evaluates [validation]"),
    dropped("do_predict", FLAG, "titan generate RUN PROMPT", False),
    dropped("predict_with_generate", FLAG, "titan generate RUN PROMPT", False),
    part("per_device_train_batch_size", WHOLE, 8, "`training.local_batch_size`"),
    part("gradient_accumulation_steps", WHOLE, 1, "`training.global_batch_size`"),
    part("per_device_eval_batch_size", WHOLE, 8, "`validation.local_batch_size`"),
    part("num_train_epochs", NUMBER, 3.0, "`training.epochs`"),
    part("max_steps", WHOLE, None, "`training.steps`"),
    part("learning_rate", NUMBER, 5e-5, "`optimizer.lr`"),
    part("optim", TEXT, "adamw_torch_fused", "`optimizer.type`"),
    part("weight_decay", NUMBER, 0.0, "`optimizer.weight_decay`, always written; not of norms"),
    part("adam_beta1", NUMBER, 0.9, "`optimizer.beta1`"),
    part("adam_beta2", NUMBER, 0.999, "`optimizer.beta2`, always written"),
    part("adam_epsilon", NUMBER, 1e-8, "`optimizer.eps`"),
    part("max_grad_norm", NUMBER, 1.0, "`training.max_norm`"),
    part("lr_scheduler_type", TEXT, "linear", "`lr_scheduler`"),
    part("lr_scheduler_kwargs.min_lr_rate", NUMBER, None, "`lr_scheduler.min_lr_factor`"),
    part("lr_scheduler_kwargs.min_lr", NUMBER, None, "`lr_scheduler.min_lr_factor`"),
    *gone("lr_scheduler_kwargs.* optim_args optim_target_modules label_smoothing_factor",
          "titan's schedules and optimizers have no such setting"),
    part("warmup_steps", NUMBER, None, "`lr_scheduler.warmup_steps`"),
    part("warmup_ratio", NUMBER, None, "`lr_scheduler.warmup_ratio`"),
    carried("seed", WHOLE, 42, "training.seed"),
    part("bf16", FLAG, False, "`training.mixed_precision_param`"),
    part("fp16", FLAG, False, "none: titan has no float16"),
    part("pure_bf16", FLAG, False, "`training.dtype`"),
    part("fp8", FLAG, False, "the converter `float8_linear` of titan-float8"),
    *idle("fp8_backend fp8_enable_fsdp_float8_all_gather tf32 average_tokens_across_devices",
          "losses are averaged over the targets of all ranks"),
    part("disable_gradient_checkpointing", FLAG, False, "`activation_checkpoint.mode`"),
    *idle("gradient_checkpointing", "disable_gradient_checkpointing says it"),
    part("neftune_noise_alpha", NUMBER, None, "the converter `neftune` of titan-optimizers"),
    part("torch_compile", FLAG, False, "`compile.enable`"),
    *idle("torch_compile_*", "titan compiles block by block"),
    part("use_muon", FLAG, False, "the optimizer `muon` of titan-muon"),
    *gone("use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini use_dft_loss "
          "use_asft_loss "
          "asft_alpha use_eaft_loss eaft_alpha", METHOD, 0),
    part("early_stopping_steps", WHOLE, None, "the callback `early_stop`"),
]  # fmt: skip
METHODS = [
    part("pref_loss", TEXT, "sigmoid", "`loss.type`"),
    part("pref_beta", NUMBER, 0.1, "`loss.beta`"),
    part("simpo_gamma", NUMBER, 0.5, "`loss.gamma`"),
    part("dpo_label_smoothing", NUMBER, 0.0, "`loss.label_smoothing`"),
    part("kto_chosen_weight", NUMBER, 1.0, "`loss.desirable_weight`"),
    part("kto_rejected_weight", NUMBER, 1.0, "`loss.undesirable_weight`"),
    *gone("pref_ftx pref_bco_weight ld_alpha", "titan's losses of pairs are not mixed with others", 0.0, 0),
    *gone("ref_model ref_model_*", "the reference is the initial model"),
    *gone("ppo_* reward_model reward_model_*",
          "PPO is the loss ppo of titan-ppo, in the loop grpo: `titan recipe new FILE --from-hf FOLDER "
          "--grpo DATA`"),
    *idle("temperature top_p top_k num_beams max_length max_new_tokens do_sample repetition_penalty "
          "length_penalty skip_special_tokens generation_*", "generation is no part of training"),
]  # fmt: skip
PARALLEL = [
    part("deepspeed", (str, dict), None, "`[parallelize]` and `[mesh]`, by the stage in its name or file"),
    part("fsdp", (str, list, bool), None, "the plan `decoder` shards by FSDP2"),
    part("fsdp_config.reshard_after_forward", (bool, str), None, "`parallelize.reshard_after_forward`"),
    part("fsdp_config.fsdp_reshard_after_forward", (bool, str), None, "`parallelize.reshard_after_forward`"),
    part("fsdp_config.offload_params", FLAG, False, "`parallelize.cpu_offload`"),
    part("fsdp_config.fsdp_offload_params", FLAG, False, "`parallelize.cpu_offload`"),
    *idle(f"{fsdp_names()} fsdp_config.* fsdp_transformer_layer_cls_to_wrap deepspeed.* ddp_* ray_* use_ray "
          "master_addr master_port resources_per_worker placement_strategy accelerator_config.*",
          "`titan train` starts the ranks"),
    part("tensor_model_parallel_size", WHOLE, 1, "`mesh.tp`"),
    part("pipeline_model_parallel_size", WHOLE, 1, "`mesh.pp`"),
    part("expert_model_parallel_size", WHOLE, 1, "`mesh.ep`"),
    part("context_parallel_size", WHOLE, 1, "`mesh.cp`"),
    *idle("use_mca use_megatron_bridge apply_rope_fusion bias_activation_fusion moe_grouped_gemm "
          "moe_token_dispatcher_type overlap_grad_reduce overlap_param_gather use_distributed_optimizer "
          "sequence_parallel recompute_granularity use_packed_sequences export_hf_on_finish "
          "use_hyper_parallel "
          "hyper_parallel_*", LAYOUT),
]  # fmt: skip
WATCHING = [
    Key("output_dir", TEXT, why=FOLDER, idle=True),
    *idle("overwrite_output_dir plot_loss include_effective_tokens_per_second include_num_input_tokens_seen "
          "logging_first_step save_only_model run_name report_to.* disable_tqdm log_level compute_accuracy "
          "enable_torch_profiler profiler_* profile_modules", "a run folder has its metrics, and is not "
                                                              "reused"),
    part("logging_steps", NUMBER, 500, "`metrics.log_freq`"),
    part("save_steps", NUMBER, 500, "`checkpoint.interval`"),
    part("save_strategy", TEXT, None, "`checkpoint.interval`"),
    part("save_total_limit", WHOLE, None, "`checkpoint.keep_latest_k`; all by default"),
    part("eval_steps", NUMBER, None, "`validation.freq`"),
    part("eval_strategy", TEXT, None, "`validation.freq`"),
    part("evaluation_strategy", TEXT, None, "`validation.freq`"),
    *gone("load_best_model_at_end metric_for_best_model greater_is_better",
          "the callback `best` keeps the checkpoint with the best evaluation"),
    part("report_to", (str, list), "none", "`[[loggers]]`"),
    *gone("resume_from_checkpoint", "titan train RUN --resume"),
    *gone("export_*", EXPORT),
    *gone("push_to_hub hub_*", "`titan hub push RUN OWNER/NAME` of the plugin titan-hub"),
    *gone("use_swanlab swanlab_* project trackio_*", "titan's loggers: csv, tensorboard, wandb, trackio"),
    *idle("infer_backend vllm_* sglang_*", "generation is no part of training"),
]  # fmt: skip
KEYS = table(MODEL, ADAPTERS, DATA, TRAINING, METHODS, PARALLEL, WATCHING)
"""All keys by name."""
