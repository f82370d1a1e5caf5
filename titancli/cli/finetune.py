"""A recipe that trains the model of a Hugging Face folder on text: `recipe new --from-hf`. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from titancli.errors import EnvironmentProblem, PluginError
from titancli.recipe.assets import hub_hint

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

LONGEST = 2048
"""Maximum tokens per row in the new recipe, even if the model supports more: it saves memory to begin
with."""
TEXT = Template("""\
recipe = 1
name = $name
weights = $folder        # the weights, and in its config.json the model
$model
[tokenizer]
type = "titan/hf"
path = $folder

[dataset]
type = "titan/text_files"
paths = ["text/*.txt"]                      # your text: files, folders, patterns

[optimizer]
type = "titan/adamw"
lr = 1e-5

[lr_scheduler]
warmup_steps = 10
decay_type = "cosine"
min_lr_factor = 0.1

[training]
steps = 200
seq_len = $seq_len
local_batch_size = 1                        # rows on each GPU at once
global_batch_size = 16                      # rows of a step

[activation_checkpoint]
mode = "selective"

[checkpoint]
interval = 100
keep_latest_k = 2
last_save_in_hf = true                      # leaves a Hugging Face folder at the end
export_dtype = $dtype
""")


def finetune_text(folder: Path, name: str, registry: Registry) -> str:
    """Return the text of a recipe `name` that fine-tunes the model in `folder` on text files.

    Raises:
        EnvironmentProblem: the folder has no config.json with a model_type, or no tokenizer.json.
        PluginError: none of titan's families reads it, and titan-transformers is not installed.
    """
    config = _config(folder)
    if not (folder / "tokenizer.json").is_file():
        raise EnvironmentProblem(
            f"{folder} has no tokenizer.json", hint="`titan download OWNER/NAME --weights` gets whole folders"
        )
    text = config.get("text_config", config)
    length = text.get("max_position_embeddings", LONGEST)
    dtype = text.get("dtype") or text.get("torch_dtype")
    model = ""
    if why := _unread(config, registry):
        kind = _transformers_model(why, registry)
        model = (
            f'\n[model]                      # {why}\ntype = "{kind}"\nconfig = {json.dumps(str(folder))}\n'
        )
    return TEXT.substitute(
        name=json.dumps(name),
        folder=json.dumps(str(folder), ensure_ascii=False),
        model=model,
        seq_len=min(LONGEST, length) if isinstance(length, int) and length > 0 else LONGEST,
        dtype=json.dumps(dtype if dtype in ("float32", "bfloat16", "float16") else "bfloat16"),
    )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
        config["model_type"]
    except FileNotFoundError as error:
        hint = hub_hint(folder) or "give a Hugging Face folder"
        raise EnvironmentProblem(f"{path} does not exist", hint=hint) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} is damaged, or names no model_type: {error}") from error
    return config


def _unread(config: dict[str, Any], registry: Registry) -> str | None:
    """Return why none of titan's families reads a config.json; None: one does.

    Raises:
        EnvironmentProblem: the weights are quantized in a way that no model reads.
    """
    from titancli.models.quantization import quantization_of
    from titancli.recipe.load import readers_of

    quantization_of(config)
    readers = readers_of(config["model_type"], registry)
    if len(readers) != 1:
        return f"none of titan's own models reads model_type {config['model_type']!r}"
    [(name, reader)] = readers.items()
    try:
        reader.from_config_json(config)
    except EnvironmentProblem as error:
        return f"{name} does not read it: {error.message}"
    except (KeyError, TypeError, ValueError) as error:
        return f"{name} does not read it: config.json lacks {error}"
    return None


def _transformers_model(why: str, registry: Registry) -> str:
    try:
        return registry.full_name(registry.find("model", "hf_causal_lm"))
    except PluginError as error:
        raise PluginError(f"{why}; {error.message}", hint=error.hint) from error
