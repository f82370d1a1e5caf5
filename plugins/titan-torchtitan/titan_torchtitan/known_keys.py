"""Keys of torchtitan's job configs, and titan's: for hints to who writes one in a recipe."""

from __future__ import annotations

import re

KEYS = {
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
    "data_parallel_shard_degree": "mesh.dp_shard",
    "data_parallel_replicate_degree": "mesh.dp_replicate",
    "tensor_parallel_degree": "mesh.tp",
    "pipeline_parallel_degree": "mesh.pp",
    "context_parallel_degree": "mesh.cp",
    "expert_parallel_degree": "mesh.ep",
}
"""Titan's keys, if a value means the same there, else words."""

SECTIONS = re.compile(r"^\[(job|parallelism)\]", re.MULTILINE)
"""Sections that job configs have, and recipes have not."""
