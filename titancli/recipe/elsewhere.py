"""The keys of other trainers and their equivalents in titan; imported only after an unknown key was found."""

from __future__ import annotations

import re

MOVED = {
    "job": "convert a torchtitan job config with: titan recipe from-torchtitan FILE OUT.toml",
    "job.description": "set description = … at the top",
    "job.dump_folder": "set the run folder on the command line: --run-dir",
    "model.tokenizer_path": "set path = … in [tokenizer]",
    "model.hf_assets_path": "set path = … in [tokenizer]",
    "model.converters": "add a [[converters]] table for each",
    "training.dataset": "set type = … in [dataset]",
    "training.dataset_path": "set path = … in [dataset]",
    "validation.enable": "name a dataset: [validation.datasets.NAME]",
    "validation.dataset": "set type = … in [validation.datasets.NAME]",
    "validation.dataset_path": "set path = … in [validation.datasets.NAME]",
    "validation.seq_len": "rows are as long as training.seq_len",
    "debug.seed": "set seed = … in [training]",
    "parallelism": "the degrees are in [mesh]: pp, dp_replicate, dp_shard, cp, tp, ep",
    "quantize": "add a [[converters]] table",
    "metrics.enable_tensorboard": 'add [[loggers]] with type = "tensorboard"',
    "checkpoint.initial_load_path": "set weights = … at the top",
    "checkpoint.folder": "checkpoints are in the run folder; set it on the command line: --run-dir",
}
"""Hints for keys of torchtitan, by section and key."""

LORA = '[[converters]] with type = "lora", rank, alpha and targets'
RUN_DIR = "the command line: titan train … --run-dir DIR"
ROWS = "training.global_batch_size: rows of a step over all ranks, from which accumulation follows"
PRECISION = 'training.mixed_precision_param: "bfloat16", the default, or "float32"'
RECOMPUTE = 'activation_checkpoint.mode: "none", "selective", "full" or "memory_budget"'
SHARDS = "mesh.dp_shard: the number of ranks for FSDP2; -1, the default: all"
EVALUATED = "validation.freq: steps between evaluations of [validation.datasets.NAME]"
HELD_OUT = "validation.datasets: a dataset in [validation.datasets.NAME]"
LOGGERS = '[[loggers]] with type = "tensorboard", for one; titan list-components logger'
DATA = "[dataset] with a type; titan list-components dataset"
CHAT = '[dataset] with type = "chat"; the template is the tokenizer\'s'
WHOLE = "weights: a Hugging Face folder, or hf://OWNER/NAME"
QUANTIZED = "no such key: 4-bit and 8-bit weights are not supported"

SYNONYMS = {
    # Hugging Face Trainer, TRL
    "learning_rate": "optimizer.lr",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "optim": "optimizer.type: titan list-components optimizer",
    "max_grad_norm": "training.max_norm",
    "per_device_train_batch_size": "training.local_batch_size",
    "train_batch_size": "training.global_batch_size",
    "per_device_eval_batch_size": "validation.local_batch_size",
    "gradient_accumulation_steps": ROWS,
    "num_train_epochs": "training.epochs",
    "max_steps": "training.steps",
    "max_seq_length": "training.seq_len",
    "max_length": "training.seq_len",
    "warmup_ratio": "lr_scheduler.warmup_steps: a number of steps",
    "lr_scheduler_type": 'lr_scheduler.decay_type: "linear", "sqrt" or "cosine"',
    "bf16": PRECISION,
    "fp16": PRECISION,
    "torch_dtype": PRECISION,
    "gradient_checkpointing": RECOMPUTE,
    "torch_compile": "compile.enable",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_latest_k",
    "save_strategy": "checkpoint.interval: steps between checkpoints",
    "logging_steps": "metrics.log_freq",
    "logging_dir": RUN_DIR,
    "eval_steps": EVALUATED,
    "eval_strategy": EVALUATED,
    "evaluation_strategy": EVALUATED,
    "output_dir": RUN_DIR,
    "overwrite_output_dir": RUN_DIR,
    "resume_from_checkpoint": "the command line: titan train RUN --resume",
    "report_to": LOGGERS,
    "run_name": "name",
    "data_seed": "training.seed",
    "dataloader_num_workers": "training.dataloader.num_workers",
    "dataloader_prefetch_factor": "training.dataloader.prefetch_factor",
    "deepspeed": SHARDS,
    "fsdp": SHARDS,
    "fsdp_config": SHARDS,
    "model_name_or_path": WHOLE,
    "dataset_name": DATA,
    "dataset_text_field": "dataset.text",
    "num_generations": "loop.samples",
    "max_completion_length": "loop.generator.max_new_tokens",
    "peft_config": LORA,
    # axolotl, LLaMA-Factory
    "base_model": WHOLE,
    "sequence_len": "training.seq_len",
    "cutoff_len": "training.seq_len",
    "micro_batch_size": "training.local_batch_size",
    "num_epochs": "training.epochs",
    "length_index": "dataset.cache_tokens",
    "sample_packing": "dataset.packing: rows are always filled; how, says packing",
    "val_set_size": HELD_OUT,
    "val_size": HELD_OUT,
    "adapter": LORA,
    "finetuning_type": LORA,
    "lora_r": LORA,
    "lora_rank": LORA,
    "lora_alpha": LORA,
    "lora_dropout": f"{LORA}; there is no dropout",
    "lora_target": LORA,
    "lora_target_modules": LORA,
    "target_modules": LORA,
    "load_in_4bit": QUANTIZED,
    "load_in_8bit": QUANTIZED,
    "stage": "loop.type: pretrain, sft, dpo or grpo",
    "template": CHAT,
    "chat_template": CHAT,
    "wandb_project": LOGGERS,
    "flash_attention": "no such key: the fastest attention that the device has is taken",
    # torchtune, torchtitan
    "batch_size": "training.local_batch_size",
    "max_steps_per_epoch": "training.steps",
    "clip_grad_norm": "training.max_norm",
    "scheduler": "[lr_scheduler]",
    "trainer": "[training]",
    "data": DATA,
    "lora": LORA,
    "peft": LORA,
    "log_every_n_steps": "metrics.log_freq",
    "enable_activation_checkpointing": RECOMPUTE,
    "metric_logger": LOGGERS,
    "checkpointer": "weights, to start from; [checkpoint], to save",
    "data_parallel_shard_degree": "mesh.dp_shard",
    "data_parallel_replicate_degree": "mesh.dp_replicate",
    "tensor_parallel_degree": "mesh.tp",
    "pipeline_parallel_degree": "mesh.pp",
    "context_parallel_degree": "mesh.cp",
    "expert_parallel_degree": "mesh.ep",
}
"""Keys of other trainers. Value: titan's key, if a value means the same there, else `KEY: words` with an
explanation."""


def moved(path: tuple[str | int, ...]) -> str | None:
    """Return a hint for a key of torchtitan; None for any other."""
    return MOVED.get(".".join(map(str, path)))


def in_titan(name: str, value: str = "") -> tuple[str | None, str] | None:
    """Return titan's key for a key of another trainer, if its value means the same, and a hint.

    Args:
        name: `learning_rate`, `learning-rate`.
        value: as an override has it, to be shown in the override to write; may be empty.

    Returns:
        None for a name that the table does not have.
    """
    said = SYNONYMS.get(name.lower().replace("-", "_"))
    if said is None:
        return None
    if not re.fullmatch(r"[a-z_0-9.]+", said):
        return None, f"in titan: {said}"
    return said, f"in titan: {said}={value}" if value else f"in titan: {said}"
