"""Keys that users of torchtitan 0.2.2 know, and what they are called here."""

from __future__ import annotations

from titancli.recipe.scan import KeyPath

MOVED = {
    "job": "a torchtitan job config is translated: titan new-recipe OUT.toml --from-torchtitan FILE",
    "job.description": "write description = … at the top",
    "job.dump_folder": "the run folder is the command's --run-dir",
    "model.tokenizer_path": "write path = … in [tokenizer]",
    "model.hf_assets_path": "write path = … in [tokenizer]",
    "model.converters": "write one [[converters]] table for each",
    "training.dataset": "write type = … in [dataset]",
    "training.dataset_path": "write path = … in [dataset]",
    "debug.seed": "write seed = … in [training]",
    "parallelism": "the degrees stand in [mesh]: pp, dp_replicate, dp_shard, cp, tp, ep",
    "quantize": "write a [[converters]] table",
    "metrics.enable_tensorboard": 'write [[loggers]] with type = "tensorboard"',
    "checkpoint.initial_load_path": "write weights = … at the top",
    "checkpoint.folder": "checkpoints lie in the run folder, which is the command's --run-dir",
}


def moved(path: KeyPath) -> str | None:
    """What to write instead of a key that torchtitan has; None for any other."""
    return MOVED.get(".".join(map(str, path)))
