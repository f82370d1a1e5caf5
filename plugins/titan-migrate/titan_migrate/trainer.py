"""What axolotl and LLaMA-Factory take from transformers' Trainer, under names that each of them chooses."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_migrate import parts
from titan_migrate.config import Config
from titan_migrate.rows import Rows
from titancli.files import read_json

FSDP_IDLE = (
    "auto_wrap_policy transformer_layer_cls_to_wrap backward_prefetch forward_prefetch use_orig_params "
    "sync_module_states cpu_ram_efficient_loading state_dict_type limit_all_gathers version "
    "sharding_strategy activation_checkpointing final_state_dict_type"
)
"""Keys of fsdp_config for which titan's plan needs no setting."""
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
}
"""Schedules of transformers, by the shapes of `from_zero`."""


@dataclass(frozen=True)
class Names:
    """A tool's names of what Trainer has."""

    schedule: str
    optimizer: str
    epochs: str
    micro: str
    accumulated: str
    save_limit: str = "save_total_limit"


def fsdp_names(prefix: str = "fsdp_config") -> str:
    """Return the keys of fsdp_config that need no setting, with and without their old prefix."""
    words = FSDP_IDLE.split()
    return " ".join(f"{prefix}.{front}{word}" for word in words for front in ("", "fsdp_"))


def optimizer(config: Config, names: Names) -> None:
    """Set the optimizer, with Trainer's defaults: betas of 0.9 and 0.999, no decay of norms and biases."""
    eps = "adam_epsilon" if config.written("adam_epsilon") or "adam_eps" not in config.keys else "adam_eps"
    sources = {"lr": "learning_rate", "beta1": "adam_beta1", "beta2": "adam_beta2", "eps": eps}
    usual = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    values = dict(usual)
    for key, source in {**sources, "weight_decay": "weight_decay"}.items():
        try:
            values[key] = float(config.value(source) if config.value(source) is not None else usual[key])
        except (ValueError, KeyError):
            config.lose(source, "is no number: set optimizer.lr")
            values[key] = 1e-4
            continue
        config.take(source)
    parts.optimizer(config, names.optimizer, values, decays_norms=False)
    norm = config.value("max_grad_norm")
    config.put("training.max_norm", 1.0 if norm is None else float(norm), "max_grad_norm")
    parts.by_name(config, "loraplus_lr_ratio", "loraplus_lr_embedding")
    alpha = config.value("neftune_noise_alpha")
    if alpha and config.has("converter", "neftune", "neftune_noise_alpha"):
        config.convert({"type": "neftune", "alpha": float(alpha)})
        config.take("neftune_noise_alpha")


def length(config: Config, names: Names, found: list[Rows]) -> int | None:
    """Set the steps or the epochs; return the steps, if they are known. The batch is set already."""
    steps = config.value("max_steps")
    if steps and steps > 0:
        config.put("training.steps", steps, "max_steps")
        if config.written(names.epochs):
            config.change(names.epochs, f"max_steps = {steps} is the length of the run, there as here")
        return int(steps)
    config.take("max_steps")
    epochs = float(config.value(names.epochs))
    if epochs <= 0:
        config.lose(names.epochs, "a run has some epochs: training.epochs = 1")
        epochs = 1.0
    if config.recipe.get("dataset", {}).get("type") != "mix":
        config.put("training.epochs", epochs)
        config.take(*([] if names.epochs in config.handled() else [names.epochs]))
        return None
    counts, training = [row.count for row in found], config.recipe["training"]
    if all(counts) and not any(row.table.get("pack") for row in found):
        rows = training.get("global_batch_size") or training["local_batch_size"] * config.asked.gpus
        known = math.ceil(sum(count or 0 for count in counts) * epochs / rows)
        config.put("training.steps", known)
        config.change(names.epochs, f"training.steps = {known}: {sum(count or 0 for count in counts)} rows, "
                      f"{epochs:g} times, {rows} a step (a mixture has no epochs)")  # fmt: skip
        return known
    config.put("training.steps", 1000)
    config.lose(
        names.epochs,
        "a mixture of data sets has no epochs: training.steps = 1000 stands in for them; set it to "
        f"rows x {epochs:g} / training.global_batch_size",
    )
    return None


def warmup(config: Config, *, axolotl: bool) -> dict[str, Any]:
    """Return the keys of the schedule `from_zero` for the warm-up."""
    steps, ratio = config.value("warmup_steps"), config.value("warmup_ratio")
    more: dict[str, Any] = {"warmup_rounding": "down"} if axolotl else {}
    if steps is not None and steps >= 1:
        config.take("warmup_steps")
        if ratio is not None and config.written("warmup_ratio"):
            config.change("warmup_ratio", "no effect: warmup_steps is set, which comes first there")
        return {"warmup_steps": 2 if axolotl and steps == 1 else int(steps)}
    if steps:  # a fraction, in transformers 5
        config.take("warmup_steps")
        ratio = steps
    config.ignore("warmup_steps") if steps == 0 else None
    if steps is not None and steps == 0 and axolotl:
        config.ignore("warmup_ratio")
        return {}
    config.take("warmup_ratio")
    if ratio is None and axolotl:
        return {"warmup_ratio": 0.03, "warmup_limit": 100, **more}
    return {} if not ratio else {"warmup_ratio": float(ratio), **more}


def schedule(config: Config, names: Names, *, axolotl: bool) -> None:
    """Set the learning rates as Trainer computes them."""
    name = str(config.value(names.schedule) or "cosine")
    kwargs = config.below("lr_scheduler_kwargs")
    begin = warmup(config, axolotl=axolotl)
    more: dict[str, Any] = {}
    if name == "cosine_with_min_lr":
        rate, lowest = (
            config.value("lr_scheduler_kwargs.min_lr_rate"),
            config.value("lr_scheduler_kwargs.min_lr"),
        )
        lr = float(config.recipe.get("optimizer", {}).get("lr", 0) or 0)
        more["min_lr_factor"] = float(rate if rate is not None else (lowest or 0.0) / (lr or 1.0))
        config.take("lr_scheduler_kwargs.min_lr_rate", "lr_scheduler_kwargs.min_lr")
    for kwarg in kwargs:
        if kwarg not in config.handled():
            config.lose(kwarg, "the shapes of titan's schedules take no further setting")
    shape = "cosine" if name == "cosine_with_min_lr" else SCHEDULES.get(name)
    if shape is None:
        config.lose(names.schedule, "titan has no such schedule: it is a cosine instead")
        shape = "cosine"
    if axolotl and shape == "cosine":
        more |= _axolotl_cosine(config, begin)
    parts.schedule(config, shape, {} if name == "constant" else begin, **more)
    config.take(*([] if names.schedule in config.handled() else [names.schedule]))


def _axolotl_cosine(config: Config, begin: dict[str, Any]) -> dict[str, Any]:
    lowest, until = config.value("cosine_min_lr_ratio"), config.value("cosine_constant_lr_ratio")
    if config.value("lr_quadratic_warmup"):
        config.take("lr_quadratic_warmup")
        for name in ("cosine_min_lr_ratio", "cosine_constant_lr_ratio"):
            config.ignore(name)
        return {"warmup_power": 2} if begin else {}
    config.take("cosine_min_lr_ratio", "cosine_constant_lr_ratio")
    found = {"min_lr_factor": float(lowest)} if lowest else {}
    return found | ({"decay_until": float(until)} if lowest and until else {})


# ------------------------------------------------------------------------------------------------- parallel


def sharding(config: Config) -> bool:
    """Set how parameters are sharded; return whether it is FSDP or DeepSpeed."""
    for name in ("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward"):
        if config.written(name):
            value = config.value(name)
            always = value is True or value == "FULL_SHARD"
            config.put("parallelize.reshard_after_forward", "always" if always else "never", name)
    for name in ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params"):
        if config.value(name):
            config.put("parallelize.cpu_offload", True)
        config.take(name)
    if config.written("fsdp"):
        config.take("fsdp")
    if config.written("deepspeed"):
        _deepspeed(config)
        return True
    return config.written("fsdp") or bool(config.below("fsdp_config"))


def _deepspeed(config: Config) -> None:
    """Translate a DeepSpeed config, of which usually only the file's name is known."""
    name = str(config.value("deepspeed"))
    text = name.lower()
    try:
        zero = read_json(Path(os.path.expanduser(name))).get("zero_optimization", {})
        stage = int(zero.get("stage", 0))
        offload = any(
            zero.get(key, {}).get("device") == "cpu" for key in ("offload_optimizer", "offload_param")
        )
    except (OSError, ValueError, AttributeError, TypeError):
        known = [number for number in range(4) if f"zero{number}" in text or f"z{number}" in text]
        stage, offload = (known[0] if known else 3), "offload" in text
    if stage == 0:
        config.put("mesh", {"dp_replicate": -1, "dp_shard": 1})
    elif stage < 3:
        config.put("parallelize.reshard_after_forward", "never")
    else:
        config.put("parallelize.reshard_after_forward", "always")
    if offload:
        config.put("parallelize.cpu_offload", True)
    how = (
        "replicas (DDP)"
        if stage == 0
        else "FSDP2 " + ("keeps" if stage < 3 else "frees") + " gathered weights"
    )
    config.change("deepspeed", f"ZeRO-{stage} is [mesh] and [parallelize]: {how}"
                  + (", and the state is in CPU memory" if offload else ""))  # fmt: skip


def checkpointing(config: Config, *, on: bool, sources: tuple[str, ...]) -> None:
    """Set whether layers are recomputed in backward."""
    config.put("activation_checkpoint.mode", "full" if on else "none")
    config.take(*sources)


# ------------------------------------------------------------------------------------------------- watching


def watching(config: Config, names: Names, steps: int | None, *, keep: int) -> None:
    """Set how often a run logs, saves and evaluates, and what it exports."""
    log = config.value("logging_steps")
    if log and log >= 1:
        config.put("metrics.log_freq", int(log))
    config.take("logging_steps")
    _every(config, "save_steps", "checkpoint.interval", steps)
    if str(config.value("save_strategy") or "") in ("no", "epoch", "best"):
        words = {"best": '[[callbacks]] type = "best"', "no": "checkpoint.enable = false"}
        how = words.get(config.value("save_strategy"), "checkpoint.interval, in steps")
        config.lose("save_strategy", f"checkpoints are saved at an interval in steps: set {how}")
    config.take(*(["save_strategy"] if "save_strategy" not in config.handled() else []))
    config.put("checkpoint.keep_latest_k", int(config.value(names.save_limit) or keep), names.save_limit)
    if not config.recipe.get("converters"):
        config.put("checkpoint.last_save_in_hf", True)
        config.put("checkpoint.export_dtype", "bfloat16")


def evaluation(config: Config, table: dict[str, Any] | None, rows: str, steps: int | None) -> None:
    """Set [validation], if there are held-out rows.

    Args:
        table: their data set.
        rows: key of the rows of a batch.
    """
    if table is None:
        for name in (rows, "eval_steps", "eval_strategy", "evaluation_strategy"):
            config.ignore(name)
        return
    config.put("validation.datasets", {"validation": table})
    if config.value(rows):
        pairs = 2 if config.recipe.get("loop", {}).get("type") == "dpo" else 1
        config.put("validation.local_batch_size", int(config.value(rows)) * pairs, rows)
    _every(config, "eval_steps", "validation.freq", steps)
    for name in ("eval_strategy", "evaluation_strategy"):
        if config.value(name) in ("no", "epoch"):
            config.lose(name, "evaluations are at an interval in steps: set validation.freq")
        config.take(*([name] if name not in config.handled() else []))


def _every(config: Config, source: str, key: str, steps: int | None) -> None:
    every = config.value(source)
    if every and every >= 1:
        config.put(key, int(every), source)
    elif every and steps:
        config.put(key, max(1, math.ceil(every * steps)), source)
    elif every and config.written(source):
        config.lose(source, f"a fraction of steps that are not known yet: set {key}")
    else:
        config.ignore(source)


def early_stop(config: Config, source: str) -> None:
    """Add the callback that ends a run which no longer improves."""
    if not config.value(source):
        config.ignore(source)
    elif "validation" not in config.recipe:
        config.lose(source, "needs held-out rows: [validation.datasets.NAME], then the callback early_stop")
    else:
        config.recipe.setdefault("callbacks", []).append(
            {"type": "early_stop", "patience": int(config.value(source))}
        )
        config.take(source)


def loggers(config: Config, wanted: dict[str, str], tables: dict[str, dict[str, Any]]) -> None:
    """Add loggers.

    Args:
        wanted: names of titan's loggers, with the key that asks for each.
        tables: further keys of each.
    """
    for name, source in wanted.items():
        if config.has("logger", name, source):
            config.recipe.setdefault("loggers", []).append({"type": name, **tables.get(name, {})})
            if source not in config.handled():
                config.take(source)
