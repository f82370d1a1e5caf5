"""Keys of the Hugging Face Trainer, TRL, axolotl, LLaMA-Factory and torchtune, and titan's for each; and how
configs of these trainers are known."""

from __future__ import annotations

import re

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
QUANTIZED = '[[converters]] with type = "qlora", rank, alpha and targets: 4-bit weights under adapters'

KEYS = {
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
    # torchtune
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
}
"""Titan's keys, if a value means the same there, else `KEY: words`."""


def config_of(text: str) -> tuple[str, str] | None:
    """Return the trainer whose config a text is, and the command that converts it."""
    from titan_migrate.translate import TOOLS

    names = set(re.findall(r"^\s*(\w+)\s*:", text, re.MULTILINE))
    found = next((tool for tool in TOOLS.values() if tool.known_by(names)), None)
    return None if found is None else (found.title, f"recipe from-{found.command}")
