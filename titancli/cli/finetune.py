"""A recipe that trains the model of a Hugging Face folder: `recipe new --from-hf`. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.cli.finetune_data import Task
from titancli.errors import EnvironmentProblem, PluginError
from titancli.models.quantization import quantization_of
from titancli.recipe.assets import hub_hint
from titancli.recipe.config_json import config_json, model_fields
from titancli.recipe.load import readers_of
from titancli.recipe.toml import comment, inline
from titancli.recipe.vocabulary import GROW, ids_in

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

LONGEST = 2048
"""Maximum tokens per row in the new recipe, even if the model supports more: it saves memory to begin
with."""
COMMENTS = {
    "weights": "the weights, and in its config.json the model",
    "weights_vocab": "the tokenizer has more ids than the folder has rows: new ones begin as the mean",
    "paths": "your text: files, folders, patterns",
    "epochs": "passes over the data; or steps = 200",
    "local_batch_size": "rows on each GPU at once",
    "global_batch_size": "rows of a step",
    "last_save_in_hf": "leaves a Hugging Face folder at the end",
    "pack": "whole conversations share rows, without seeing each other",
    "prompts": "of a step, over all ranks",
    "samples": "completions of each prompt",
    "load_balance_coeff": "adapters leave the base's routing as it is",
}
"""By key, at the end of its line."""

PROGRAMS = {"dpo": "titan-preference/dpo", "grpo": "titan-rl/grpo"}
"""Loops of plugins, by what is learned."""

Sections = dict[str, dict[str, Any]]
"""Values by section and key, in the order of the file; `""` has the top."""


def finetune_sections(
    folder: Path, name: str, registry: Registry, task: Task, adapters: str | None
) -> Sections:
    """Return a recipe `name` that trains the model in `folder`.

    Args:
        task: what is learned, and from which data.
        adapters: the converter that adds adapters, which are then all that is trained; None: all weights are.

    Raises:
        EnvironmentProblem: the folder has no config.json with a model_type, or no tokenizer.json; or one of
            them is damaged.
        PluginError: none of titan's families reads it, and titan-transformers is not installed; or the plugin
            with the task's loop or with `adapters` is not.
    """
    config = _config(folder)
    if not (folder / "tokenizer.json").is_file():
        raise EnvironmentProblem(
            f"{folder} has no tokenizer.json", hint="`titan download OWNER/NAME --weights` gets whole folders"
        )
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    length = text.get("max_position_embeddings", LONGEST)
    length = min(LONGEST, length) if isinstance(length, int) and length > 0 else LONGEST
    dtype = text.get("dtype") or text.get("torch_dtype")
    made: Sections = {"": {"recipe": 1, "name": name, "weights": str(folder)}}
    rows, ids = text.get("vocab_size"), _ids_in(folder)
    grows = isinstance(rows, int) and ids > rows
    if grows:
        made[""]["weights_vocab"] = GROW
    if model := model_section(folder, registry):
        made["model"] = model | ({"config": {"type": str(folder), "vocab_size": ids}} if grows else {})
    elif adapters is not None and _balances(_read(config, registry)):
        made["model.moe"] = {"load_balance_coeff": 0.0}
    made["tokenizer"] = {"type": "titan/hf", "path": str(folder)}
    if (loop := PROGRAMS.get(task.kind)) is not None:
        registry.find("loop", loop)  # says what to install
    made |= task.sections(length)
    if adapters is not None:
        kind = registry.full_name(registry.find("converter", adapters))
        made["[converters]"] = {"type": kind, "rank": 16, "alpha": 32.0}
    made["optimizer"] = {"type": "titan/adamw", "lr": task.lr * (1 if adapters is None else 10)}
    made["lr_scheduler"] = {"warmup_steps": 10, "decay_type": "cosine", "min_lr_factor": 0.1}
    made["training"] = {
        **({"steps": 200} if task.kind == "grpo" else {"epochs": 2}),
        "seq_len": length,
        "local_batch_size": task.rows,
        **({} if task.rows_of_step is None else {"global_batch_size": task.rows_of_step}),
    }
    made["activation_checkpoint"] = {"mode": "selective"}
    made["checkpoint"] = {
        "interval": 100,
        "keep_latest_k": 2,
        "last_save_in_hf": True,
        "export_dtype": dtype if dtype in ("float32", "bfloat16", "float16") else "bfloat16",
    }
    return made


def _ids_in(folder: Path) -> int:
    """Return the number of ids of the tokenizer in a folder; 0 if it is damaged, which every start says."""
    try:
        return ids_in(folder)
    except EnvironmentProblem:
        return 0


def model_section(folder: Path, registry: Registry) -> dict[str, Any]:
    """Return [model] for the model in a folder, with why under `#`; empty if titan reads it as it is."""
    why = _read(_config(folder), registry)
    if not isinstance(why, str):
        return {}
    try:
        kind = registry.full_name(registry.find("model", "hf_causal_lm"))
    except PluginError as error:
        raise PluginError(f"{why}; {error.message}", hint=error.hint) from error
    return {"#": why, "type": kind, "config": str(folder)}


def as_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of a recipe, with comments."""
    blocks = []
    for header, values in sections.items():
        remark = comment(values["#"], "  # ") if "#" in values else ""
        lines = [f"[{header}]{remark}"] if header else []
        for key, value in values.items():
            if key != "#":
                line = f"{key} = {inline(value)}"
                lines.append(f"{line:<43} {comment(COMMENTS[key])}" if key in COMMENTS else line)
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def changed(sections: Sections, overrides: list[str]) -> Sections:
    """Return sections after overrides as `titan plan` names them, each `SECTION.KEY=VALUE`."""
    made = {header: dict(values) for header, values in sections.items()}
    for override in overrides:
        key, _, value = override.partition("=")
        header, _, name = key.rpartition(".")
        try:
            found = json.loads(value)
        except ValueError:
            found = value
        made.setdefault(header, {})[name] = found
    return made


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        hint = hub_hint(folder) or "give a Hugging Face folder"
        raise EnvironmentProblem(f"{path} does not exist", hint=hint)
    return config_json(path)


def _read(config: dict[str, Any], registry: Registry) -> dict[str, Any] | str:
    """Return the keys of [model] that a config.json stands for, or why none of titan's families reads it.

    Raises:
        EnvironmentProblem: the weights are quantized in a way that no model reads.
    """
    quantization_of(config)
    readers = readers_of(config["model_type"], registry)
    if len(readers) != 1:
        return f"none of titan's own models reads model_type {config['model_type']!r}"
    [(name, reader)] = readers.items()
    try:
        return model_fields(reader, config)
    except EnvironmentProblem as error:
        return f"{name} does not read it: {error.message}"
    except ValueError as error:
        return f"{name} does not read it: {error}"


def _balances(model: dict[str, Any] | str) -> bool:
    """Return whether training a model would move the routers' biases, which adapters leave as they are."""
    moe = {} if isinstance(model, str) else model.get("moe", {})
    return bool(moe.get("load_balance_coeff")) and not moe.get("freeze_expert_bias", False)
