"""torchtune's configs: what their keys mean together."""

from __future__ import annotations

import os
import re
from typing import Any

from titan_migrate import parts
from titan_migrate.config import Config
from titan_migrate.document import DEEPEST, MOST, Leaf
from titan_migrate.torchtune_keys import ON_POLICY
from titancli.errors import RecipeError

INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
LONGEST = 10_000
"""Characters of a text that references make."""
MODULES = ("q_proj", "k_proj", "v_proj", "output_proj")
ALPACA = ("instruction", "input", "output")
SFT = {
    "alpaca_dataset": ("alpaca", "tatsu-lab/alpaca", {}),
    "alpaca_cleaned_dataset": ("alpaca", "yahma/alpaca-cleaned", {}),
    "grammar_dataset": ("prompt_completion", "liweili/c4_200m", {"prompt": "input", "completion": "output"}),
    "samsum_dataset": (
        "prompt_completion",
        "Samsung/samsum",
        {"prompt": "dialogue", "completion": "summary"},
    ),
    "instruct_dataset": ("prompt_completion", None, {"prompt": "input", "completion": "output"}),
    "slimorca_dataset": ("sharegpt", "Open-Orca/SlimOrca-Dedup", {}),
    "chat_dataset": ("messages", None, {}),
}
"""torchtune's datasets of conversations: titan's format, their source, their columns by titan's fields."""
TEXTS = {
    "text_completion_dataset": (None, "text"),
    "cnn_dailymail_articles_dataset": ("ccdv/cnn_dailymail", "article"),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "page"),
}
PAIRS = {
    "preference_dataset": None,
    "hh_rlhf_helpful_dataset": "RLHFlow/HH-RLHF-Helpful-standard",
    "stack_exchange_paired_dataset": "lvwerra/stack-exchange-paired",
}
PROMPTS = {"alpaca_dataset", "alpaca_cleaned_dataset", "grammar_dataset", "samsum_dataset"}
"""Datasets that put the prompt into words of their own."""


def resolve(leaves: list[Leaf]) -> tuple[list[Leaf], list[tuple[Leaf, str]]]:
    """Return values with OmegaConf's `${key}` replaced, and those that cannot be, with the reason.

    Raises:
        RecipeError: references of references are more than `MOST`.
    """
    references = _References(leaves)
    found, lost = [], []
    for leaf in leaves:
        try:
            found.append(Leaf(leaf.path, references.resolved(leaf.value, leaf), leaf.line))
        except LookupError as error:
            lost.append((leaf, str(error.args[0])))
    return found, lost


class _References:
    """What `${key}` stands for. A few lines that refer to one another twice each would make a text of any
    length: look-ups, depth and length are bounded."""

    def __init__(self, leaves: list[Leaf]) -> None:
        self._known = {leaf.name: leaf for leaf in leaves}
        self._count = 0

    def resolved(self, value: Any, at: Leaf, seen: tuple[str, ...] = ()) -> Any:
        if isinstance(value, list):
            return [self.resolved(one, at, seen) for one in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if whole := INTERPOLATION.fullmatch(value):
            return self._of(whole[1], at, seen)
        text, done = "", 0
        for match in INTERPOLATION.finditer(value):
            text += value[done : match.start()] + str(self._of(match[1], at, seen))
            done = match.end()
            if len(text) > LONGEST:
                raise LookupError(f"it becomes longer than {LONGEST:,} characters")
        text += value[done:]
        if "${" in text:
            raise LookupError("it is computed when the tool starts: write the value")
        return text

    def _of(self, reference: str, at: Leaf, seen: tuple[str, ...]) -> Any:
        name = reference.strip()
        if ":" in name:
            raise LookupError(f"${{{name}}} is computed when the tool starts: write the value")
        if name.startswith("."):
            up = len(name) - len(name.lstrip("."))
            name = ".".join([*at.path[: max(0, len(at.path) - up)], name.lstrip(".")])
        if name in seen:
            raise LookupError(f"${{{name}}} refers to itself")
        if name not in self._known:
            raise LookupError(f"${{{name}}} is not set in this config: write the value")
        if len(seen) >= DEEPEST:
            raise LookupError(f"${{{name}}} is a reference of more than {DEEPEST} references")
        self._count += 1
        if self._count > MOST:
            raise RecipeError(f"the config's references are more than {MOST:,}", hint="write the values")
        return self.resolved(self._known[name].value, self._known[name], (*seen, name))


def refuse(path: str, leaves: list[Leaf]) -> None:
    """Refuse configs of torchtune that train nothing.

    Raises:
        RecipeError: it is one of evaluation, generation or quantization.
    """
    names = {leaf.name for leaf in leaves}
    if any(name.startswith(("optimizer.", "training.")) for name in names):
        return
    if "tasks" in names:
        raise RecipeError(f"{path} evaluates, and trains nothing", hint="titan lm-eval RUN --task NAME")
    if any(name.startswith("prompt") for name in names):
        raise RecipeError(f"{path} generates text, and trains nothing", hint="titan generate RUN PROMPT")
    raise RecipeError(
        f"{path} trains nothing: it has no optimizer", hint="give a training config of torchtune"
    )


def translate(config: Config) -> None:
    """Translate what belongs together; the rest is in `torchtune_keys.KEYS`."""
    folder = parts.model(config, "checkpointer.checkpoint_dir")
    _adapters(config)
    _precision(config)
    _objective(config)
    length = config.value("tokenizer.max_seq_len")
    config.put("training.seq_len", length or parts.longest(folder), "tokenizer.max_seq_len")
    if not length:
        rows = config.recipe["training"]["seq_len"]
        how = f"training.seq_len = {rows}: rows have no limit there; longer ones are cut here"
        config.note("tokenizer.max_seq_len", how)
    _length(config)
    _optimizer(config)
    _memory(config)
    _watching(config)
    if config.value("seed") is not None:
        config.put("training.seed", config.value("seed"), "seed")


def _adapters(config: Config) -> None:
    component = str(config.value("model._component_") or "")
    name = component.rpartition(".")[2]
    if not name.startswith(("lora_", "qlora_")):
        if component and not component.startswith("torchtune.models."):
            config.lose("model._component_", "is not torchtune's own: the model is that of the folder")
        config.take("model._component_")
        return
    modules = config.value("model.lora_attn_modules")
    listed = [str(one) for one in (modules if modules is not None else ["q_proj", "v_proj"])]
    if config.value("model.apply_lora_to_mlp"):
        listed += ["gate_proj", "down_proj", "up_proj"]
    if config.value("model.apply_lora_to_output"):
        listed += ["output"]
    taken = ("model.apply_lora_to_mlp", "model.apply_lora_to_output", "model.lora_rank", "model.lora_alpha")
    config.take("model._component_", *taken)
    layers = parts.targets(config, listed, "model.lora_attn_modules")
    if "model.lora_attn_modules" not in config.handled():
        config.take("model.lora_attn_modules")
    quantized = "model._component_" if name.startswith("qlora_") else (
        "model.quantize_base" if config.value("model.quantize_base") else None)  # fmt: skip
    parts.adapters(
        config, config.value("model.lora_rank"), config.value("model.lora_alpha"), layers, quantized
    )
    config.ignore("model.quantize_base")
    parts.dropout(config, "model.lora_dropout")
    if config.value("model.use_dora"):
        config.recipe["converters"][-1]["dora"] = True
    config.take("model.use_dora")


def _precision(config: Config) -> None:
    dtype = str(config.value("dtype"))
    if dtype in ("fp32", "float32"):
        config.put("training.mixed_precision_param", "float32", "dtype")
    else:
        config.put("training.dtype", "bfloat16", "dtype")
        if dtype in ("fp16", "float16"):
            config.lose("dtype", "titan has no float16: bfloat16 is used")
        elif config.written("dtype"):
            config.change(
                "dtype", "weights, gradients and moments are bfloat16, rounded stochastically by adamw"
            )
    if config.value("enable_fp8_training") and config.has(
        "converter", "float8_linear", "enable_fp8_training"
    ):
        config.convert({"type": "float8_linear"})
        config.take("enable_fp8_training")
    config.ignore("enable_fp8_training")
    if config.written("quantizer._component_"):
        config.lose(
            "quantizer._component_",
            "titan does not simulate int4 in training: train, then quantize the export",
        )


# ------------------------------------------------------------------------------------------------------ data


def _objective(config: Config) -> None:
    loss = str(config.value("loss._component_") or "").rpartition(".")[2]
    kind = str(config.value("dataset._component_") or "").rpartition(".")[2]
    if loss in ("PPOLoss", "GRPOSimpleLoss", "GRPOLoss", "GRPOCompletionLoss", "LinearGRPOLoss"):
        config.lose("loss._component_", ON_POLICY)
        config.put("loss.type", "sft")
    elif kind in PAIRS or loss == "DPOLoss":
        config.put("loss", {"type": "dpo", "beta": float(config.value("loss.beta"))}, "loss._component_")
        config.put(
            "loss.label_smoothing", float(config.value("loss.label_smoothing")), "loss.label_smoothing"
        )
        config.take("loss.beta")
        config.put("loop.type", "dpo")
        if config.written("ref_checkpointer.checkpoint_dir"):
            same = config.value("ref_checkpointer.checkpoint_dir") == config.value(
                "checkpointer.checkpoint_dir"
            )
            if same:
                config.ignore("ref_checkpointer.checkpoint_dir")
            else:
                why = "the reference is the initial model; of another one, dataset.reference_logps = true"
                config.lose("ref_checkpointer.checkpoint_dir", why)
    elif config.written("teacher_checkpointer.checkpoint_dir"):
        _distil(config)
    elif kind in TEXTS:
        config.put("loss.type", "cross_entropy", "loss._component_")
    else:
        if loss and "CrossEntropy" not in loss and not loss.startswith("CE"):
            config.lose("loss._component_", "titan has no such loss: it is the cross-entropy of answers")
        config.put("loss.type", "sft")
        config.put("loop.type", "sft")
    config.take(*(["loss._component_"] if "loss._component_" not in config.handled() else []))
    names = config.elements("dataset") or config.elements("datasets")
    tables = [_dataset(config, name) for name in names or ["dataset"]]
    if len(tables) > 1:
        config.lose(f"{names[1]}._component_", "rows of the first one are used: name several in a `mix`, "
                    "which counts in steps and not in epochs")  # fmt: skip
    config.put("dataset", tables[0] | {"shuffle": bool(config.value("shuffle"))}, "shuffle")
    if config.below("dataset_val"):
        _validation(config)


def _distil(config: Config) -> None:
    if not config.has("loop", "distil", "kd_loss._component_", "teacher_checkpointer.checkpoint_dir"):
        config.put("loss.type", "sft")
        config.put("loop.type", "sft")
        return
    teacher = str(config.value("teacher_checkpointer.checkpoint_dir"))
    config.put("loop", {"type": "distil", "teacher": {"weights": teacher}})
    config.put("loss", {"type": "distil", "sft_weight": 1.0 - float(config.value("kd_ratio"))}, "kd_ratio")
    if "Reverse" in str(config.value("kd_loss._component_")):
        config.put("loss.divergence", "reverse_kl")
    config.take("kd_loss._component_", "teacher_checkpointer.checkpoint_dir")


def _dataset(config: Config, at: str) -> dict[str, Any]:
    component = str(config.value(f"{at}._component_") or "")
    kind = component.rpartition(".")[2]
    table: dict[str, Any] = {"type": "chat"}
    if kind in SFT:
        table |= _conversations(config, at, kind)
    elif kind in TEXTS:
        return _texts(config, at, kind)
    elif kind in PAIRS:
        table = {"type": "preference", "path": _source(config, at, PAIRS[kind])}
        _columns(config, at, table, {})
        if kind == "stack_exchange_paired_dataset":
            table["fields"] = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
            config.change(f"{at}._component_", "a question is the user's message, without words around it")
        config.ignore(f"{at}.train_on_input", f"{at}.packed")
    elif "gsm8k" in kind:
        table |= {"path": "openai/gsm8k", "name": "main", "format": "prompt_completion",
                  "fields": {"prompt": "question", "completion": "answer"}}  # fmt: skip
        config.change(f"{at}._component_", "is read as questions and answers of openai/gsm8k")
    else:
        config.lose(f"{at}._component_", "is no data set that titan knows: set dataset.path and format")
        table["path"] = _source(config, at, "your/dataset")
    for name in ("name", "subset"):
        if config.value(f"{at}.{name}"):
            table["name"] = config.value(f"{at}.{name}")
            config.take(f"{at}.{name}")
    return table | _split(config, at)


def _split(config: Config, at: str) -> dict[str, Any]:
    found = {}
    for name in ("split", "revision"):
        if config.written(f"{at}.{name}"):
            found[name] = config.value(f"{at}.{name}")
            config.take(f"{at}.{name}")
    config.take(f"{at}._component_") if f"{at}._component_" not in config.handled() else None
    return found


def _source(config: Config, at: str, usual: str | None) -> str:
    source, files = config.value(f"{at}.source"), config.value(f"{at}.data_files")
    config.take(f"{at}.source", f"{at}.data_files")
    if files:
        listed = [files] if isinstance(files, str) else [str(one) for one in files]
        if len(listed) > 1:
            config.change(
                f"{at}.data_files", "the first is read: a pattern names several, as in ./data/*.jsonl"
            )
        return listed[0] if os.path.isabs(listed[0]) else f"./{listed[0]}"
    if config.written(f"{at}.data_dir"):
        config.lose(f"{at}.data_dir", "set dataset.path to that folder")
    return parts.place(str(source or usual or "your/dataset"))


def _columns(config: Config, at: str, table: dict[str, Any], usual: dict[str, str]) -> None:
    names = {"input": "prompt", "output": "completion"} if table.get("format") == "prompt_completion" else {}
    fields = dict(usual)
    for name in config.below(f"{at}.column_map"):
        key = name.rpartition(".")[2]
        fields[names.get(key, key)] = str(config.value(name))
        config.take(name)
    if fields := {key: value for key, value in fields.items() if key != value}:
        table["fields"] = fields


def _conversations(config: Config, at: str, kind: str) -> dict[str, Any]:
    form, usual, fields = SFT[kind]
    found: dict[str, Any] = {"path": _source(config, at, usual), "format": form}
    _columns(config, at, found, fields)
    if kind == "chat_dataset":
        style, column = config.value(f"{at}.conversation_style"), config.value(f"{at}.conversation_column")
        found["format"] = "sharegpt" if style == "sharegpt" else "messages"
        usual_column = "conversations" if style == "sharegpt" else "messages"
        config.take(f"{at}.conversation_style", f"{at}.conversation_column")
        if column and column != usual_column:
            found["fields"] = {usual_column: column}
    everything = config.value(f"{at}.train_on_input")
    everything = kind.startswith("alpaca") if everything is None else everything  # True there, by default
    found["train_on"] = "all" if everything else "assistant"
    packed = bool(config.value(f"{at}.packed"))
    found |= {"pack": packed} | ({} if packed else {"padding": "longest"})
    config.take(f"{at}.train_on_input", f"{at}.packed")
    if kind in PROMPTS and config.written(f"{at}._component_"):
        config.change(f"{at}._component_", "the user's message is the row's text, without the words "
                                           "that torchtune "
                      "puts around it: `titan data show` prints both")  # fmt: skip
    return found


def _texts(config: Config, at: str, kind: str) -> dict[str, Any]:
    usual, column = TEXTS[kind]
    column = str(config.value(f"{at}.column")) if config.written(f"{at}.column") else column
    table: dict[str, Any] = {"type": "hf", "path": _source(config, at, usual)}
    if column != "text":
        table["text"] = column
    if kind == "wikitext_dataset":
        table["name"] = config.value(f"{at}.subset") or "wikitext-103-v1"
        config.take(f"{at}.subset")
    table["add_eos"] = bool(config.value(f"{at}.add_eos"))
    config.take(f"{at}.column", f"{at}.add_eos")
    if config.value(f"{at}.packed"):
        config.take(f"{at}.packed")
    elif config.written(f"{at}.packed"):
        table |= {"document_mask": True, "packing": "best_fit"}
        config.change(f"{at}.packed", "documents share rows, whole, and do not attend to each other")
    return table | _split(config, at)


def _validation(config: Config) -> None:
    every = config.value("run_val_every_n_steps")
    if every is None:
        for name in config.below("dataset_val"):
            config.ignore(name)
        config.ignore("batch_size_val")
        return
    table = _dataset(config, "dataset_val")
    config.put("validation", {"freq": every, "datasets": {"validation": table}}, "run_val_every_n_steps")
    if config.value("batch_size_val"):
        config.put("validation.local_batch_size", config.value("batch_size_val"), "batch_size_val")


# -------------------------------------------------------------------------------------------------- training


def _length(config: Config) -> None:
    rows = 2 if config.recipe.get("loop", {}).get("type") == "dpo" else 1
    parts.batch(config, "batch_size", "gradient_accumulation_steps", rows)
    most, epochs = config.value("max_steps_per_epoch"), config.value("epochs")
    steps = config.value("num_steps")
    if steps or most:
        config.put("training.steps", int(steps or most * epochs), "num_steps", "epochs")
        config.take("max_steps_per_epoch")
        if most and not steps:
            config.change(
                "max_steps_per_epoch", f"training.steps = {most * epochs}: epochs go on one after another"
            )
    else:
        config.put("training.epochs", float(epochs), "epochs")


def _optimizer(config: Config) -> None:
    betas = config.value("optimizer.betas")
    good = len(betas) == 2 and all(isinstance(beta, float) for beta in betas)
    if not good:
        config.lose("optimizer.betas", "AdamW has two of them, below 1")
    beta1, beta2 = betas if good else (0.9, 0.999)
    values = {"lr": config.value("optimizer.lr"), "beta1": beta1, "beta2": beta2}
    values |= {name: config.value(f"optimizer.{name}") for name in ("eps", "weight_decay")}
    parts.optimizer(config, "optimizer._component_", values, decays_norms=True)
    config.take(
        *(f"optimizer.{name}" for name in ("lr", "eps", "weight_decay", "betas") if good or name != "betas")
    )
    if config.value("optimizer_in_bwd"):
        config.lose(
            "optimizer_in_bwd", "the optimizer steps once, when all gradients are there: the same numbers"
        )
    config.ignore("optimizer_in_bwd")
    config.put("training.max_norm", float(config.value("clip_grad_norm") or 0.0), "clip_grad_norm")
    name = str(config.value("lr_scheduler._component_") or "")
    if not name:
        parts.schedule(config, "constant")
        return
    if not name.endswith("get_cosine_schedule_with_warmup"):
        config.lose("lr_scheduler._component_", "titan has no such schedule: it is a cosine instead")
    parts.schedule(config, "cosine", {"warmup_steps": config.value("lr_scheduler.num_warmup_steps")})
    config.take("lr_scheduler.num_warmup_steps", *(
        [] if "lr_scheduler._component_" in config.handled() else ["lr_scheduler._component_"]))  # fmt: skip


def _memory(config: Config) -> None:
    name = "enable_activation_checkpointing"
    mode = "full" if config.value(name) else "none"
    if config.value("ac_mode") and not config.value(name):
        mode = "selective" if config.value("ac_mode") == "selective" else "full"
        if mode == "selective" and config.written("ac_option"):
            config.put("activation_checkpoint.selective_ac_option", str(config.value("ac_option")))
    config.put("activation_checkpoint.mode", mode, name, "ac_mode", "ac_option")
    parts.offloading(config, "enable_activation_offloading")
    compiled = config.value("compile")
    config.put("compile.enable", bool(compiled) or bool(config.below("compile")), "compile")
    for name, key, usual in (
        ("tensor_parallel_dim", "mesh.tp", 1),
        ("context_parallel_dim", "mesh.cp", 1),
        ("data_parallel_shard_dim", "mesh.dp_shard", -1),
        ("data_parallel_replicate_dim", "mesh.dp_replicate", 1),
    ):
        if config.value(name) != usual:
            config.put(key, config.value(name))
        config.take(name)
    for name in ("fsdp_cpu_offload", "fsdp.cpu_offload"):
        if config.value(name):
            config.put("parallelize.cpu_offload", True)
        config.take(name)
    if config.written("fsdp_reshard_after_forward"):
        how = "always" if config.value("fsdp_reshard_after_forward") else "never"
        config.put("parallelize.reshard_after_forward", how, "fsdp_reshard_after_forward")


def _watching(config: Config) -> None:
    config.put("metrics.log_freq", max(1, config.value("log_every_n_steps")), "log_every_n_steps")
    logger = str(config.value("metric_logger._component_") or "").rpartition(".")[2]
    named = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}.get(logger)
    if named and config.has("logger", named, "metric_logger._component_"):
        table = {"type": named}
        if named == "wandb" and config.value("metric_logger.project"):
            table["project"] = config.value("metric_logger.project")
        config.recipe["loggers"] = [table]
        config.take("metric_logger._component_", "metric_logger.project")
    elif logger in ("DiskLogger", "StdoutLogger"):
        config.ignore("metric_logger._component_")
    elif logger and not named:
        config.lose("metric_logger._component_", "titan has no such logger: `titan list-components logger`")
    config.ignore("metric_logger.project")
    if config.value("profiler.enabled"):
        config.put("profiling.enable_profiling", True, "profiler.enabled")
        config.put(
            "profiling.profiler_active", config.value("profiler.active_steps"), "profiler.active_steps"
        )
        config.put(
            "profiling.profiler_warmup", config.value("profiler.warmup_steps"), "profiler.warmup_steps"
        )
        config.put("profiling.profile_freq", 10)
    config.ignore("profiler.enabled", "profiler.active_steps", "profiler.warmup_steps")
    if every := config.value("save_every_n_steps"):
        config.put("checkpoint.interval", every, "save_every_n_steps")
    if config.value("save_every_n_epochs"):
        config.lose("save_every_n_epochs", "set checkpoint.interval, in steps")
    if keep := config.value("checkpointer.keep_last_n_checkpoints"):
        config.put("checkpoint.keep_latest_k", keep, "checkpointer.keep_last_n_checkpoints")
    config.put("checkpoint.last_save_in_hf", True)
    config.put("checkpoint.export_dtype", "bfloat16")
    config.ignore("save_adapter_weights_only")
    if config.value("resize_token_embeddings"):
        config.lose("resize_token_embeddings", "add the tokens to the model's folder in advance")
    config.ignore("resize_token_embeddings")
    if config.value("cudnn_deterministic_mode"):
        config.put("debug.deterministic", True)
    config.take("cudnn_deterministic_mode")
