"""LLaMA-Factory's configs: what their keys mean together."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from titan_migrate import parts, trainer
from titan_migrate.config import Config
from titan_migrate.document import Leaf
from titan_migrate.rows import Rows, count, hold_out, merged
from titancli.errors import RecipeError
from titancli.files import read_json

INFO = "dataset_info.json"
NAMES = trainer.Names(
    "lr_scheduler_type",
    "optim",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)
COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "history": "history",
}
"""Columns of rows in the format of Alpaca, by titan's fields."""
SPEAKERS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "system_tag": "system",
}


def refuse(path: str, leaves: list[Leaf]) -> None:
    """Refuse configs that train nothing.

    Raises:
        RecipeError: it merges adapters, or generates.
    """
    names = {leaf.name: leaf.value for leaf in leaves}
    if "export_dir" in names and "dataset" not in names:
        hint = "titan convert-checkpoint RUN OUT --to hf merges the adapters of a run"
        raise RecipeError(f"{path} exports, and trains nothing", hint=hint)
    if "dataset" not in names or (names.get("do_predict") and not names.get("do_train")):
        hint = "titan generate RUN PROMPT" if "infer_backend" in names else "give a config with dataset: NAME"
        raise RecipeError(f"{path} trains on no data set", hint=hint)


def translate(config: Config) -> None:
    """Translate what belongs together; the rest is in `llamafactory_keys.KEYS`."""
    parts.model(config, "model_name_or_path")
    _adapters(config)
    trainer.sharding(config)
    _precision(config)
    config.put("training.seq_len", config.value("cutoff_len"), "cutoff_len")
    _objective(config)
    found, held_out = _datasets(config)
    pairs = config.recipe["loss"]["type"] in ("dpo", "ipo", "orpo", "simpo", "reward")
    parts.batch(config, NAMES.micro, NAMES.accumulated, 2 if pairs else 1)
    steps = trainer.length(config, NAMES, found)
    trainer.optimizer(config, NAMES)
    if config.value("use_muon"):
        lr, adamw = config.recipe["optimizer"].get("lr"), config.recipe["optimizer"]
        if config.has("optimizer", "muon", "use_muon", what="it is AdamW instead"):
            muon = {"type": "muon", "lr": lr, "weight_decay": adamw.get("weight_decay", 0.0)}
            more = {"adjust_lr": "match_rms_adamw", "fallback": adamw}
            config.put("optimizer", muon | more, "use_muon")
    config.ignore("use_muon")
    trainer.schedule(config, NAMES, axolotl=False)
    config.put("training.seed", config.value("seed"), "seed")
    off = bool(config.value("disable_gradient_checkpointing"))
    trainer.checkpointing(config, on=not off, sources=("disable_gradient_checkpointing",))
    for name, key in (("tensor", "tp"), ("pipeline", "pp"), ("expert", "ep")):
        if config.value(f"{name}_model_parallel_size") > 1:
            config.put(f"mesh.{key}", config.value(f"{name}_model_parallel_size"))
        config.take(f"{name}_model_parallel_size")
    if config.value("context_parallel_size") > 1:
        config.put("mesh.cp", config.value("context_parallel_size"))
    config.take("context_parallel_size")
    config.put("compile.enable", bool(config.value("torch_compile")), "torch_compile")
    _watching(config, held_out, steps)


def _adapters(config: Config) -> None:
    kind = config.value("finetuning_type")
    if kind == "full":
        config.take("finetuning_type")
        for name in [
            "lora_rank",
            "lora_alpha",
            "lora_dropout",
            "lora_target",
            "use_rslora",
            "use_dora",
            "quantization_bit",
        ]:
            config.ignore(name)
        return
    if kind != "lora":
        config.lose("finetuning_type", f"titan has no {kind}: adapters (LoRA) are trained")
    rank = config.value("lora_rank")
    alpha = config.value("lora_alpha") or 2 * rank
    asked = config.value("lora_target")
    listed = [one.strip() for one in (asked.split(",") if isinstance(asked, str) else map(str, asked))]
    layers = None if "all" in listed else parts.targets(config, filter(None, listed), "lora_target")
    bits = config.value("quantization_bit")
    parts.adapters(config, rank, alpha, layers, "quantization_bit" if bits == 4 else None)
    if bits and bits != 4:
        config.lose(
            "quantization_bit", "titan has bases of 4 bits (NF4): it is trained with in 16 bits instead"
        )
    for name in ("finetuning_type", "lora_rank", "lora_alpha", "lora_target"):
        config.take(*([] if name in config.handled() else [name]))
    parts.dropout(config, "lora_dropout")
    parts.form(config, "use_rslora", "use_dora")


def _precision(config: Config) -> None:
    """Set dtypes: what is trained is float32 there, unless `pure_bf16` is set."""
    brain, half, pure = (bool(config.value(name)) for name in ("bf16", "fp16", "pure_bf16"))
    if half and not brain:
        config.lose("fp16", "titan has no float16: bfloat16 is used")
    elif not brain and not pure and not config.recipe.get("converters"):
        config.put("training.mixed_precision_param", "float32")
    if pure:
        config.put("training.dtype", "bfloat16")
    config.take("bf16", "pure_bf16", *([] if "fp16" in config.handled() else ["fp16"]))
    if config.value("fp8") and config.has("converter", "float8_linear", "fp8"):
        config.convert({"type": "float8_linear"})
        config.take("fp8")
    config.ignore("fp8")


def _objective(config: Config) -> None:
    stage, kind = config.value("stage"), config.value("pref_loss")
    beta = float(config.value("pref_beta"))
    if stage == "pt":
        config.put("loss.type", "cross_entropy", "stage")
    elif stage == "rm" and config.has("loss", "reward", "stage"):
        config.put("loss.type", "reward", "stage")
        config.put("loop.type", "sft")
    elif stage == "kto" and config.has("loop", "kto", "stage"):
        loss: dict[str, Any] = {"type": "kto", "beta": beta}
        loss["desirable_weight"] = float(config.value("kto_chosen_weight"))
        loss["undesirable_weight"] = float(config.value("kto_rejected_weight"))
        config.put("loss", loss, "stage")
        config.put("loop.type", "kto")
        config.take("pref_beta", "kto_chosen_weight", "kto_rejected_weight")
    elif stage == "dpo":
        _pairs(config, kind, beta)
    else:
        if stage != "sft":
            config.lose("stage", "PPO is the loss ppo of titan-ppo, in the loop grpo: set it by hand")
        config.take(*([] if "stage" in config.handled() else ["stage"]))
        config.put("loss.type", "sft")
        config.put("loop.type", "sft")
    for name in [
        "pref_loss",
        "pref_beta",
        "simpo_gamma",
        "dpo_label_smoothing",
        "kto_chosen_weight",
        "kto_rejected_weight",
    ]:
        config.ignore(name)


def _pairs(config: Config, kind: str, beta: float) -> None:
    name = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}.get(kind)
    if name is None:
        config.lose("pref_loss", "titan's losses of pairs are dpo, ipo, orpo and simpo: it is dpo instead")
        name = "dpo"
    elif not config.has("loss", name, "pref_loss", what="it is dpo instead"):
        name = "dpo"
    loss: dict[str, Any] = {"type": name, "beta": beta}
    if name == "simpo":
        loss["gamma"] = float(config.value("simpo_gamma"))
    if name == "dpo":
        loss["label_smoothing"] = float(config.value("dpo_label_smoothing"))
    config.put("loss", loss, "stage", "pref_beta", "simpo_gamma", "dpo_label_smoothing")
    config.take(*([] if "pref_loss" in config.handled() else ["pref_loss"]))
    config.put("loop.type", "dpo")


# ------------------------------------------------------------------------------------------------------ data


def _listed(value: Any) -> list[str]:
    return [
        one.strip()
        for one in (value.split(",") if isinstance(value, str) else map(str, value or []))
        if one.strip()
    ]


def _shares(config: Config, count: int) -> list[float] | None:
    """Return the shares of `count` data sets; None if they are not given, or are no numbers above 0."""
    given = _listed(config.value("interleave_probs"))
    try:
        shares = [float(share) for share in given]
    except ValueError:
        shares = []
    if given and not (len(shares) == count and all(0 < share < math.inf for share in shares)):
        config.lose("interleave_probs", "its values are no shares of the data sets: set dataset.weights")
        return None
    return shares or None


def _info(config: Config) -> tuple[dict[str, Any], Path]:
    """Return dataset_info.json, and the folder of its files: of `dataset_dir`, here or beside the config."""
    folder = Path(os.path.expanduser(str(config.value("dataset_dir"))))
    for place in (Path(), *config.near.parents):
        try:
            found = read_json(place / folder / INFO)
            return (found if isinstance(found, dict) else {}), place / folder
        except (OSError, ValueError):
            continue
    return {}, folder


def _datasets(config: Config) -> tuple[list[Rows], dict[str, Any] | None]:
    """Set the data sets; return them, and the one of held-out rows."""
    info, folder = _info(config)
    names = _listed(config.value("dataset"))
    found = [_rows(config, name, info, folder, "dataset") for name in names]
    if not found:
        found = [Rows("dataset", {"type": "chat", "path": "your/dataset"})]
        config.note("dataset", "no data set is named: set dataset.path")
    config.take("interleave_probs", "mix_strategy", "dataset_dir", "max_samples")
    shares = _shares(config, len(found))
    held_out = None
    if others := _listed(config.value("eval_dataset")):
        held_out = _rows(config, others[0], info, folder, "eval_dataset").table
        if len(others) > 1:
            config.lose("eval_dataset", "name each of them in [validation.datasets.NAME]; the first is")
    elif config.value("val_size"):
        held_out = hold_out(config, found, "val_size")
    config.ignore("val_size")
    config.put("dataset", merged(config, found, shares))
    if config.value("streaming"):
        config.lose("streaming", "conversations are read whole; text streams with dataset.streaming = true")
    for name in ("dataset", "eval_dataset", "train_on_prompt", "packing", "neat_packing"):
        config.take(*([] if name in config.handled() else [name]))
    config.ignore("streaming")
    return found, held_out


def _rows(config: Config, name: str, info: dict[str, Any], folder: Path, source: str) -> Rows:
    entry = info.get(name)
    table: dict[str, Any]
    if not isinstance(entry, dict):
        if not any(row.name == source for row in config.changed):
            config.change(source, f"{name} is in no {INFO} here: set dataset.path and format, or run "
                                  f"this again "
                          "where `dataset_dir` is")  # fmt: skip
        entry = {"file_name": f"{name}.json"}
    url = entry.get("hf_hub_url") or entry.get("ms_hub_url") or entry.get("om_hub_url")
    rows = None
    if url:
        path = str(url)
    else:
        file = folder / str(entry.get("file_name") or entry.get("script_url") or name)
        rows = count(str(file))
        path = parts.place(str(file)) if file.is_absolute() else f"./{file}"
    objective = config.recipe["loss"]["type"]
    kind = {"cross_entropy": "hf", "kto": "unpaired", "reward": "reward_pairs"}.get(objective)
    kind = kind or ("preference" if config.recipe["loop"]["type"] == "dpo" else "chat")
    table = {"type": kind, "path": path}
    if entry.get("subset"):
        table["name"] = str(entry["subset"])
    split, most = str(entry.get("split", "train")), config.value("max_samples")
    if most and (rows is None or most < rows):
        table["split"] = f"{split}[:{most}]"
    elif split != "train":
        table["split"] = split
    table |= _form(entry, kind)
    if kind == "chat":
        table |= _packing(config)
    elif kind == "hf":
        table |= {"document_mask": bool(config.value("neat_packing"))}
    else:
        table["padding"] = "longest"
    if any(_table(entry, "columns").get(key) for key in ("images", "videos", "audios")):
        config.lose(source, "images, video and sound of rows are no input: titan trains on text")
    return Rows(source, table, None if rows is None else min(rows, most or rows))


def _table(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table of dataset_info.json; an empty one if it is something else."""
    found = entry.get(name)
    return found if isinstance(found, dict) else {}


def _form(entry: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return format, fields and roles of rows, as dataset_info.json describes them."""
    columns, tags = _table(entry, "columns"), _table(entry, "tags")
    shared = entry.get("formatting") in ("sharegpt", "openai")
    if kind == "hf":
        column = columns.get("prompt", "text")
        return {} if column == "text" else {"text": column}
    found: dict[str, Any] = {}
    if shared:
        role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
        plain = (role, content) == ("role", "content")
        own = {"messages" if plain else "conversations": columns.get("messages", "conversations")}
        own |= {} if plain else {"from": role, "value": content}
        found["format"] = "messages" if plain else "sharegpt"
        usual = {"human": "user", "gpt": "assistant", "observation": "tool", "system": "system"}
        roles = {str(tags[tag]): target for tag, target in SPEAKERS.items() if tag in tags}
        found["roles"] = {key: value for key, value in roles.items() if usual.get(key, key) != value}
    else:
        found["format"] = "alpaca"
        own = {COLUMNS[key]: column for key, column in columns.items() if key in COLUMNS}
    own |= {key: columns[key] for key in ("chosen", "rejected", "tools", "system") if key in columns}
    if kind == "unpaired" and "kto_tag" in columns:
        own["label"] = columns["kto_tag"]
        if not shared:
            own["completion"] = columns.get("response", "output")
    found["fields"] = {str(key): str(value) for key, value in own.items() if key != value}
    if kind != "chat":
        found.pop("format")
    return {key: value for key, value in found.items() if value}


def _packing(config: Config) -> dict[str, Any]:
    packed = bool(config.value("neat_packing") or config.value("packing"))
    if config.value("packing") and not config.value("neat_packing") and "packing" not in config.handled():
        config.change("packing", "conversations of a row do not attend to each other, as with neat_packing")
    found: dict[str, Any] = {
        "train_on": "all" if config.value("train_on_prompt") else "assistant",
        "pack": packed,
    }
    return found | ({"too_long": "skip"} if packed else {"padding": "longest"})


def _watching(config: Config, held_out: dict[str, Any] | None, steps: int | None) -> None:
    trainer.watching(config, NAMES, steps, keep=0)
    trainer.evaluation(config, held_out, "per_device_eval_batch_size", steps)
    trainer.early_stop(config, "early_stopping_steps")
    wanted = {}
    for name in _listed(config.value("report_to")):
        if name in ("wandb", "tensorboard", "trackio"):
            wanted[name] = "report_to"
        elif name not in ("none", "all"):
            config.lose("report_to", "titan's loggers: csv, tensorboard, wandb, trackio")
    trainer.loggers(config, wanted, {})
    config.ignore("report_to")
