"""axolotl's configs: what their keys mean together."""

from __future__ import annotations

import re
from typing import Any

from titan_migrate import parts, trainer
from titan_migrate.config import Config
from titan_migrate.document import Leaf
from titan_migrate.rows import Rows, hold_out, merged

NAMES = trainer.Names(
    "lr_scheduler", "optimizer", "num_epochs", "micro_batch_size", "gradient_accumulation_steps"
)
WORDS = (
    "the user's message is the row's text, in the tokenizer's chat template, without the words that axolotl "
    "puts around it"
)
PAIRS = {"intel": "question", "icr": "input", "argilla": "instruction"}
"""Fields of prompts, by the last part of a type of pairs."""
LOSSES = {
    "dpo": ("dpo", "dpo", "preference"),
    "ipo": ("ipo", "dpo", "preference"),
    "orpo": ("orpo", "dpo", "preference"),
    "simpo": ("simpo", "dpo", "preference"),
    "kto": ("kto", "kto", "unpaired"),
}
"""By `rl`: the loss, the loop and the data set."""


def refuse(path: str, leaves: list[Leaf]) -> None:
    """Refuse nothing: all configs of axolotl that name a base model train."""


def translate(config: Config) -> None:
    """Translate what belongs together; the rest is in `axolotl_keys.KEYS`."""
    parts.model(config, "base_model")
    _adapters(config)
    sharded = trainer.sharding(config)
    _precision(config, sharded=sharded)
    config.put("training.seq_len", config.value("sequence_len"), "sequence_len")
    _objective(config)
    found, held_out = _datasets(config)
    _batch(config)
    steps = trainer.length(config, NAMES, found)
    trainer.optimizer(config, NAMES)
    trainer.schedule(config, NAMES, axolotl=True)
    config.put("training.seed", config.value("seed"), "seed")
    recomputed = config.value("gradient_checkpointing")
    trainer.checkpointing(config, on=bool(recomputed), sources=("gradient_checkpointing",))
    by_checkpoints = isinstance(recomputed, str) and not config.value("activation_offloading")
    parts.offloading(config, "gradient_checkpointing" if by_checkpoints else "activation_offloading")
    _mesh(config)
    _watching(config, held_out, steps)


def _adapters(config: Config) -> None:
    kind = config.value("adapter")
    if not kind:
        names = (
            "lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear load_in_4bit load_in_8bit"
        )
        for name in f"{names} peft_use_rslora peft_use_dora".split():
            config.ignore(name)
        return
    if kind not in ("lora", "qlora"):
        config.lose("adapter", "titan's adapters are lora and qlora: lora is used")
    rank, alpha = config.value("lora_r"), config.value("lora_alpha")
    quantized = "load_in_4bit" if config.value("load_in_4bit") else "adapter" if kind == "qlora" else None
    parts.adapters(config, rank, alpha, _layers(config), quantized)
    config.take("lora_r", "lora_alpha", *(["adapter"] if "adapter" not in config.handled() else []))
    config.ignore("load_in_4bit")
    if config.value("load_in_8bit"):
        config.lose("load_in_8bit", "the base is trained with in 16 bits: titan has no base of 8 bits")
    config.ignore("load_in_8bit")
    parts.dropout(config, "lora_dropout")
    parts.form(config, "peft_use_rslora", "peft_use_dora")


def _layers(config: Config) -> list[str] | None:
    """Return the layers that are adapted; all linear ones are asked for by `lora_target_linear`."""
    source = "lora_target_modules"
    named = config.value(source)
    config.take("lora_target_linear")
    if isinstance(named, str):
        if re.search(r"[\\(\[|*]", named):
            config.change(
                source, "all linear layers of the blocks: titan's targets are no regular expressions"
            )
            return None
        named = [named]
    if config.value("lora_target_linear") or not named:
        if heads := [name for name in named or [] if str(name).rpartition(".")[2] in parts.HEADS]:
            config.change(source, f"all linear layers of the blocks, without {', '.join(heads)}")
        config.take(*([] if source in config.handled() else [source]))
        return None
    layers = parts.targets(config, map(str, named), source)
    config.take(*([] if source in config.handled() else [source]))
    return layers


def _precision(config: Config, *, sharded: bool) -> None:
    """Set dtypes: without adapters and without sharding, axolotl keeps weights and moments in bfloat16."""
    names = ("bf16", "bfloat16", "fp16", "float16")
    brain = bool(config.value("bf16") or config.value("bfloat16"))
    half = bool(config.value("fp16") or config.value("float16"))
    for name in ("fp16", "float16"):
        if config.value(name) and not brain:
            config.lose(name, "titan has no float16: bfloat16 is used")
    if not brain and not half:
        config.put("training.mixed_precision_param", "float32")
    elif not config.recipe.get("converters") and not sharded:
        config.put("training.dtype", "bfloat16")
        if config.written("bf16"):
            config.change("bf16", "weights and moments are bfloat16, rounded stochastically by adamw")
    for name in names:
        config.take(*([] if name in config.handled() else [name]))
    if config.value("fp8") and config.has("converter", "float8_linear", "fp8"):
        config.convert({"type": "float8_linear"})
        config.take("fp8")
    config.ignore("fp8")


def _objective(config: Config) -> None:
    rl = config.value("rl")
    if rl in LOSSES:
        loss, loop, _ = LOSSES[rl]
        kinds = [("loss", loss), ("loop", loop)]
        if all(config.has(kind, name, "rl") for kind, name in kinds):
            _preference(config, loss, loop)
            return
    elif rl:
        config.lose("rl", "titan learns from rewards by the loop grpo: set it by hand, `titan recipe "
                          "new FILE "
                    "--from-hf FOLDER --grpo DATA`")  # fmt: skip
    elif config.value("reward_model") and config.has("loss", "reward", "reward_model"):
        config.put("loss", {"type": "reward", "center": float(config.value("center_rewards_coefficient"))})
        config.put("loop.type", "sft")
        config.take("reward_model", "center_rewards_coefficient", "num_labels")
        return
    config.put("loss.type", "sft")
    config.put("loop.type", "sft")


def _preference(config: Config, loss: str, loop: str) -> None:
    table: dict[str, Any] = {"type": loss}
    beta = config.value("rl_beta")
    source = "rl_beta"
    if beta is None and loss == "orpo":
        beta, source = config.value("orpo_alpha"), "orpo_alpha"
    table["beta"] = float(beta if beta is not None else 0.1)  # TRL's default, of CPO and SimPO, too
    config.take(source)
    config.ignore("orpo_alpha")
    if loss == "simpo":
        table["gamma"] = float(
            config.value("simpo_gamma") if config.value("simpo_gamma") is not None else 0.5
        )
        config.take("simpo_gamma")
        if config.value("cpo_alpha"):
            how = (
                "there, cpo_alpha times the cross-entropy of chosen answers is added; titan's simpo has none"
            )
            config.lose("cpo_alpha", how)
    config.ignore("cpo_alpha")
    if loss == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            table[name] = float(config.value(f"kto_{name}"))
            config.take(f"kto_{name}")
    if loss == "dpo" and config.written("dpo_label_smoothing"):
        table["label_smoothing"] = float(config.value("dpo_label_smoothing"))
        config.take("dpo_label_smoothing")
    config.put("loss", table, "rl")
    config.put("loop.type", loop)


# ------------------------------------------------------------------------------------------------------ data


def _datasets(config: Config) -> tuple[list[Rows], dict[str, Any] | None]:
    """Set the data sets; return them, and the one of held-out rows."""
    text = config.elements("pretraining_dataset")
    if text or config.value("pretraining_dataset"):
        _pretraining(config, text)
        return [], None
    found = [_rows(config, at) for at in config.elements("datasets")]
    if not found:
        found = [Rows("datasets", {"type": "chat", "path": "your/dataset"})]
        config.note("datasets", "no data set is named: set dataset.path")
    texts = {row.table["type"] in ("hf", "jsonl") for row in found}
    if texts == {True} and config.recipe["loss"]["type"] == "sft":
        config.put("loss.type", "cross_entropy")
        config.recipe.pop("loop")
    held_out = _held_out(config, found)
    for name in ("sample_packing", "pad_to_sequence_len", "excess_length_strategy", "train_on_inputs"):
        config.take(*([] if name in config.handled() else [name]))
    config.put("dataset", merged(config, found))
    return found, held_out


def _pretraining(config: Config, elements: list[str]) -> None:
    at = elements[0] if elements else ""
    path = config.value(f"{at}.path") if at else config.value("pretraining_dataset")
    path = path[0] if isinstance(path, list) else path
    table: dict[str, Any] = {"type": "hf", "path": parts.place(str(path)), "streaming": True}
    for name in ("name", "split"):
        if at and config.written(f"{at}.{name}"):
            table[name] = config.value(f"{at}.{name}")
            config.take(f"{at}.{name}")
    for name in ("field", "text_column"):
        if at and config.written(f"{at}.{name}"):
            table["text"] = config.value(f"{at}.{name}")
            config.take(f"{at}.{name}")
    if config.value("sample_packing"):
        table["document_mask"] = True
    config.take("sample_packing", "pretraining_dataset", f"{at}.path")
    config.ignore("pad_to_sequence_len", "excess_length_strategy", "train_on_inputs", "val_set_size")
    for extra in elements[1:]:
        config.lose(f"{extra}.path", "the first one is read: name several in a `concat`")
    if config.elements("datasets"):
        for name in config.below("datasets"):
            config.lose(name, "pretraining_dataset is what is trained on")
    config.recipe.pop("loop", None)
    config.put("loss.type", "cross_entropy")
    config.put("dataset", table)


def _rows(config: Config, at: str) -> Rows:
    kind = config.value(f"{at}.type")
    kind = kind if isinstance(kind, str) else ""
    if not kind and config.below(f"{at}.type"):
        return Rows(at, _described(config, at))
    base, _, style = kind.partition(":")
    objective = config.recipe["loss"]["type"]
    if config.recipe.get("loop", {}).get("type") in ("dpo", "kto") or objective == "reward":
        table = _pairs(config, at, kind)
    elif base.startswith("completion") or base == "pretrain":
        table = {"type": "hf", **_where(config, at), "text": config.value(f"{at}.field")}
        table |= {"document_mask": True, "packing": "best_fit"}
        config.take(f"{at}.field", f"{at}.type")
    else:
        table = _conversations(config, at, kind, style)
    return Rows(at, table)


def _where(config: Config, at: str) -> dict[str, Any]:
    """Return path, name, split and revision of a data set."""
    path, files = str(config.value(f"{at}.path") or "your/dataset"), config.value(f"{at}.data_files")
    found: dict[str, Any] = {}
    if path.startswith(("s3://", "gs://", "gcs://", "az://", "oci://")):
        config.lose(f"{at}.path", "download it, or tokenize it into shards: `titan data tokenize`")
        path = "./" + path.rpartition("/")[2]
    elif files and path in ("json", "csv", "parquet", "text"):
        listed = [files] if isinstance(files, str) else [str(one) for one in files]
        path = listed[0]
        config.take(f"{at}.path", f"{at}.data_files")
        if len(listed) > 1:
            config.change(
                f"{at}.data_files", "the first is read: a pattern names several, as in ./data/*.jsonl"
            )
    elif files:
        config.lose(f"{at}.data_files", "download them, and name them by a pattern: ./data/*.jsonl")
    found["path"] = parts.place(path)
    config.take(*([] if f"{at}.path" in config.handled() else [f"{at}.path"]))
    for name in ("name", "split", "revision"):
        if config.written(f"{at}.{name}"):
            found[name] = config.value(f"{at}.{name}")
            config.take(f"{at}.{name}")
    return found


def _described(config: Config, at: str) -> dict[str, Any]:
    """Translate a type that the config itself describes: fields, and words around them."""
    fields = {}
    for name, key in (
        ("instruction", "instruction"),
        ("input", "input"),
        ("output", "output"),
        ("system", "system"),
    ):
        source = f"{at}.type.field_{name}"
        if any(leaf == source for leaf in config.entries) and config.value(source):
            fields[key] = str(config.value(source))
            config.take(source)
    for name in config.below(f"{at}.type"):
        if name not in config.handled():
            config.lose(name, "words around a row's texts are those of the tokenizer's chat template")
    table = {"type": "chat", **_where(config, at), "format": "alpaca"}
    if fields := {key: value for key, value in fields.items() if key != value}:
        table["fields"] = fields
    return _packed(config, table, everything=bool(config.value("train_on_inputs")))


def _conversations(config: Config, at: str, kind: str, style: str) -> dict[str, Any]:
    table: dict[str, Any] = {"type": "chat", **_where(config, at)}
    everything = bool(config.value("train_on_inputs"))
    if kind.startswith(("chat_template", "messages", "sharegpt")):
        table |= _messages(config, at)
        everything = everything or config.value(f"{at}.roles_to_train") == []
        if config.value(f"{at}.roles_to_train") not in ([], ["assistant"], ["gpt"]):
            config.lose(f"{at}.roles_to_train", "the assistant's messages are trained on, or all tokens")
        config.take(*([] if f"{at}.roles_to_train" in config.handled() else [f"{at}.roles_to_train"]))
        config.take(f"{at}.type")
    elif kind.startswith(("alpaca", "gpteacher", "explainchoice", "context_qa", "summarizetldr", "jeopardy")):
        table["format"] = "alpaca"
        if ".load_qa" in kind or ".load_camel_ai" in kind:
            table["fields"] = {"instruction": "question", "output": "answer"}
        config.change(f"{at}.type", WORDS)
    else:
        config.lose(f"{at}.type", "titan does not know rows of this type: set dataset.format and fields, "
                    "`titan data show FILE --recipe R` prints them")  # fmt: skip
    return _packed(config, table, everything=everything)


def _messages(config: Config, at: str) -> dict[str, Any]:
    """Return format, fields and roles of rows of messages."""
    keys = {}
    for key in ("role", "content"):
        names = (f"{at}.message_property_mappings.{key}", f"{at}.message_field_{key}")
        keys[key] = next((config.value(name) for name in names if config.written(name)), key)
        config.take(*names)
    column = config.value(f"{at}.field_messages")
    roles: dict[str, str] = {}
    spoken = keys != {"role": "role", "content": "content"}
    fields = {"conversations" if spoken else "messages": column}
    fields |= {"from": keys["role"], "value": keys["content"]} if spoken else {}
    fields["tools"] = config.value(f"{at}.field_tools")
    config.take(f"{at}.field_messages", f"{at}.field_tools")
    for name in config.below(f"{at}.roles"):
        target = name.rpartition(".")[2]
        roles |= {str(one): target for one in config.value(name) if str(one) != target}
        config.take(name)
    found: dict[str, Any] = {"format": "sharegpt" if spoken else "messages"}
    if own := {key: value for key, value in fields.items() if key != value}:
        found["fields"] = own
    return found | ({"roles": roles} if roles else {})


def _packed(config: Config, table: dict[str, Any], *, everything: bool) -> dict[str, Any]:
    table["train_on"] = "all" if everything else "assistant"
    packed = bool(config.value("sample_packing"))
    table["pack"] = packed
    if not packed and not config.value("pad_to_sequence_len"):
        table["padding"] = "longest"
    excess = config.value("excess_length_strategy")
    table["too_long"] = "cut" if excess == "truncate" else "skip"
    if excess == "raise":
        table["strict"] = True
    return table


def _pairs(config: Config, at: str, kind: str) -> dict[str, Any]:
    loop = config.recipe["loop"]["type"]
    reward = config.recipe["loss"]["type"] == "reward"
    table: dict[str, Any] = {
        "type": "unpaired" if loop == "kto" else "reward_pairs" if reward else "preference"
    }
    table |= _where(config, at)
    last = kind.rpartition(".")[2]
    fields = {"prompt": PAIRS[last]} if last in PAIRS else {}
    if last == "argilla" and loop == "dpo":
        fields |= {"chosen": "chosen_response", "rejected": "rejected_response"}
    for key in ("chosen", "rejected"):
        if config.written(f"{at}.field_{key}"):
            fields[key] = config.value(f"{at}.field_{key}")
            config.take(f"{at}.field_{key}")
    if kind.startswith("chat_template"):
        table |= {key: value for key, value in _messages(config, at).items() if key != "format"}
        config.take(f"{at}.type")
    elif kind:
        config.change(f"{at}.type", "prompts and answers are in the tokenizer's chat template")
    own = {key: value for key, value in fields.items() if key != value}
    if own or table.get("fields"):
        table["fields"] = {**table.get("fields", {}), **own}
    table["padding"] = "longest"
    return table


def _held_out(config: Config, found: list[Rows]) -> dict[str, Any] | None:
    tests = config.elements("test_datasets")
    if tests:
        path = f"{tests[0]}.path"
        table = {**found[0].table, "path": parts.place(str(config.value(path)))}
        split = config.entries.get(f"{tests[0]}.split")
        table["split"] = str(split.value) if split else "train"
        config.take(path, f"{tests[0]}.split")
        return table
    return hold_out(config, found, "val_set_size")


# -------------------------------------------------------------------------------------------------- training


def _batch(config: Config) -> None:
    pairs = config.recipe["loop"]["type"] == "dpo" if "loop" in config.recipe else False
    pairs = pairs or config.recipe["loss"]["type"] == "reward"
    ranks = (config.value("dp_shard_size") or 1) * (config.value("dp_replicate_size") or 1)
    total = config.value("batch_size")
    if total and not config.written("gradient_accumulation_steps"):
        times = max(1, int(total) // int(config.value("micro_batch_size")))
        leaf = config.entries["batch_size"]
        config.entries["gradient_accumulation_steps"] = Leaf(
            ("gradient_accumulation_steps",), times, leaf.line
        )
        parts.batch(config, "micro_batch_size", "gradient_accumulation_steps", 2 if pairs else 1, ranks)
        del config.entries["gradient_accumulation_steps"]
        config.changed = [row for row in config.changed if row.name != "gradient_accumulation_steps"]
        config.moved.discard("gradient_accumulation_steps")
        config.change("batch_size", f"{times} batches of micro_batch_size a step on each GPU")
        return
    parts.batch(config, "micro_batch_size", "gradient_accumulation_steps", 2 if pairs else 1, ranks)
    config.ignore("batch_size")


def _mesh(config: Config) -> None:
    for name, key in (
        ("dp_shard_size", "mesh.dp_shard"),
        ("dp_replicate_size", "mesh.dp_replicate"),
        ("context_parallel_size", "mesh.cp"),
        ("sequence_parallel_degree", "mesh.cp"),
        ("tensor_parallel_size", "mesh.tp"),
        ("expert_parallel_size", "mesh.ep"),
    ):
        if (config.value(name) or 1) > 1:
            config.put(key, config.value(name))
        config.take(name)
    compiled = config.value("torch_compile")
    config.put("compile.enable", compiled is True, "torch_compile")


def _watching(config: Config, held_out: dict[str, Any] | None, steps: int | None) -> None:
    trainer.watching(config, NAMES, steps, keep=4)
    trainer.evaluation(config, held_out, "eval_batch_size", steps)
    epochs = float(config.value("num_epochs"))
    if config.written("saves_per_epoch") and not config.value("save_steps"):
        parts.per_epoch(config, "saves_per_epoch", "checkpoint.interval", epochs, steps)
    if held_out is None:
        config.ignore("evals_per_epoch")
    elif config.written("evals_per_epoch") and not config.value("eval_steps"):
        parts.per_epoch(config, "evals_per_epoch", "validation.freq", epochs, steps)
    config.ignore("saves_per_epoch", "evals_per_epoch")
    trainer.early_stop(config, "early_stopping_patience")
    if config.value("save_first_step"):
        config.put("checkpoint.enable_first_step_checkpoint", True, "save_first_step")
    wanted = {}
    if config.value("use_wandb") or (
        config.value("wandb_project") and config.value("use_wandb") is not False
    ):
        wanted["wandb"] = "use_wandb" if config.value("use_wandb") else "wandb_project"
    for name in ("tensorboard", "trackio"):
        if config.value(f"use_{name}"):
            wanted[name] = f"use_{name}"
    own = {key: config.value(f"wandb_{key}") for key in ("project", "entity") if config.value(f"wandb_{key}")}
    trainer.loggers(config, wanted, {"wandb": own})
    if "wandb" in wanted:
        config.take(*(f"wandb_{key}" for key in own if f"wandb_{key}" not in config.handled()))
    for name in (
        "use_wandb",
        "use_tensorboard",
        "use_trackio",
        "wandb_project",
        "wandb_entity",
        "save_first_step",
    ):
        config.ignore(name)
