"""`recipe`: a recipe that trains in seconds on a CPU, for testing a component."""

from __future__ import annotations

from pathlib import Path

TINY = """\
recipe = 1
name = "tiny"

[model]
type = "titan/llama3"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
hidden_dim = 64
vocab_size = 257

[tokenizer]
type = "titan/byte"

[dataset]
type = "titan/python_stdlib"

[activation_checkpoint]
mode = "none"

[lr_scheduler]
warmup_steps = 1

[training]
steps = 3
seq_len = 32
local_batch_size = 2
mixed_precision_param = "float32"

[checkpoint]
enable = false

[metrics]
log_freq = 1
"""


def recipe(folder: str | Path, text: str = "") -> Path:
    """Write a recipe of three steps on the CPU into a folder, and return its path.

    Args:
        text: TOML merged over it, e.g. `'[loss]\\ntype = "z_loss"'`.

    It has a Llama 3 of two layers and the standard library's source as bytes: no download, and no
    checkpoints.
    """
    folder = Path(folder)
    (folder / "tiny.toml").write_text(TINY, encoding="utf-8")
    path = folder / "recipe.toml"
    path.write_text(f'recipe = 1\nextends = "tiny.toml"\n{text}\n', encoding="utf-8")
    return path
