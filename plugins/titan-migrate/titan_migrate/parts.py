"""What the tools have in common: models, adapters, optimizers, schedules, batches, held-out rows."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titan_migrate.config import Config
from titancli.commands.folders import model_section
from titancli.errors import TitanError
from titancli.files import read_json

HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z", re.ASCII)
LAYERS = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "output_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
"""Linear layers of a block by their names in Hugging Face folders and torchtune, with titan's."""
BLOCK = set(LAYERS.values())
HEADS = {"lm_head": "output", "output": "output"} | dict.fromkeys(
    ("embed_tokens", "tok_embeddings"), "tok_embeddings"
)
"""The output and the embedding, likewise."""
EIGHT_BIT = "no memory pages: if it does not fit, parallelize.cpu_offload keeps the state in CPU memory"
FLOAT32 = "with weights in float32, which it needs: training.dtype"


def model(config: Config, source: str) -> Path | None:
    """Set the weights and the tokenizer; return the folder, if it is on this machine."""
    given = config.asked.model or str(config.value(source) or "")
    if not given:
        config.note(source, "no model is named: set weights and tokenizer.path, or give --model FOLDER")
        given = "./your-model"
    folder = Path(os.path.expanduser(given))
    if not os.path.isfile(folder / "config.json"):
        if HUB.match(given) and not os.path.isdir(folder.parent):
            folder = Path("models") / given.rpartition("/")[2]
            here = os.path.isfile(folder / "config.json")
            fetch = f"titan download {given} --weights --dir {folder}"
            config.put("assets", given, source)
            config.change(source, f"is read from ./{folder}" + ("" if here else f": {fetch}"))
        elif config.written(source):
            config.change(source, f"is no Hugging Face folder on this machine yet: put one at {given}")
    path = str(folder) if folder.is_absolute() else f"./{folder}"
    config.put("weights", path, source)
    config.put("tokenizer.type", "hf")
    config.put("tokenizer.path", path)
    if not os.path.isfile(folder / "config.json"):
        return None
    try:
        section = model_section(Path(path), config.registry)
    except TitanError as error:
        config.lose(source, f"{error.message}: set [model]")
        return folder
    if section:
        config.put("model", {key: value for key, value in section.items() if key != "#"})
        config.change(source, f"{section['#']}: its modules are those of transformers")
    return folder


def longest(folder: Path | None, least: int = 4096) -> int:
    """Return the length of rows for a tool that has no limit: what the model supports, at most `least`."""
    try:
        text = read_json(Path(folder or "") / "config.json")
        most = text.get("text_config", text).get("max_position_embeddings", least)
    except (OSError, ValueError, AttributeError):
        return least
    return min(least, most) if isinstance(most, int) and most > 0 else least


# ------------------------------------------------------------------------------------------------ adapters


def targets(config: Config, names: Iterable[str], source: str) -> list[str] | None:
    """Return the layers that adapters change, by titan's names; None: all linear layers of the blocks."""
    own = config.recipe.get("model", {}).get("type", "").endswith("hf_causal_lm")
    found: list[str] = []
    for name in names:
        last = name.rpartition(".")[2]
        if last in HEADS and (own or _tied(config)):
            why = (
                "here, adapters change layers of its blocks" if own else "embedding and output share a weight"
            )
            config.change(source, f"without {last}: {why}")
        elif last in HEADS:
            found.append(HEADS[last])
        elif last in LAYERS:
            found.append(name if own else LAYERS[last])
        elif own or last in BLOCK:
            found.append(name)
        else:
            config.change(
                source,
                f"titan has no layer {name!r} by that name; `titan plan` lists a model's, "
                f"for [[converters]] targets",
            )
    same = {LAYERS.get(name, name) for name in found}
    whole = same >= BLOCK and not same & set(HEADS.values())
    return None if not found or whole else list(dict.fromkeys(found))


def _tied(config: Config) -> bool:
    """Return whether the embedding and the output share a weight, as far as the folder is here."""
    try:
        text = read_json(Path(config.recipe["weights"]) / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(text, dict) and bool(text.get("tie_word_embeddings", False))


def adapters(
    config: Config, rank: int, alpha: float, layers: list[str] | None, quantized: str | None = None
) -> None:
    """Add LoRA, or QLoRA where `quantized` names the key that asks for a base of 4 bits."""
    table: dict[str, Any] = {"type": "lora", "rank": rank, "alpha": float(alpha)}
    if quantized and config.has(
        "converter", "qlora", quantized, what="the base is trained with in 16 bits instead"
    ):
        table["type"] = "qlora"
        config.take(quantized)
    config.convert(table | ({} if layers is None else {"targets": layers}))


def form(config: Config, rslora: str, dora: str) -> None:
    """Carry rsLoRA and DoRA over: `rslora` and `dora` are the tool's keys."""
    adapters = config.recipe["converters"][-1]
    for field, source in (("rslora", rslora), ("dora", dora)):
        if field == "dora" and config.value(source) and "tok_embeddings" in (adapters.get("targets") or []):
            config.lose(source, "an embedding has no magnitudes: without it in targets, set dora = true")
        elif config.value(source):
            adapters[field] = True
            config.take(source)
        else:
            config.ignore(source)


def dropout(config: Config, source: str) -> None:
    """Report a dropout of adapters."""
    if config.value(source):
        config.lose(source, "titan's adapters have no dropout; weights and gradients are those without it")
    else:
        config.ignore(source)


# ----------------------------------------------------------------------------------------------- optimizers

ADAMW = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw"), ""),
    **dict.fromkeys(("torch.optim.AdamW", "optimi_adamw", "torch.optim.adamw.AdamW"), ""),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw", "bitsandbytes.optim.PagedAdamW"), EIGHT_BIT),
    "adamw_anyprecision": "its state is float32; optimizer.state_dtype makes it bfloat16",
}
"""Names of AdamW, with a remark where there is one."""
ADAMW_8BIT = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "ao_adamw_8bit"), ""),
    **dict.fromkeys(("bitsandbytes.optim.AdamW8bit", "torchao.optim.AdamW8bit"), ""),
    **dict.fromkeys(("paged_adamw_8bit", "bitsandbytes.optim.PagedAdamW8bit"), EIGHT_BIT),
}
LION = {
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "lion"), ""),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "bitsandbytes.optim.Lion8bit"), "its state is float32"),
}
HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay")


def optimizer(config: Config, source: str, values: dict[str, float], *, decays_norms: bool) -> None:
    """Set the optimizer that a name means; AdamW, with a remark, if titan has none of that kind.

    Args:
        values: `lr`, `beta1`, `beta2`, `eps`, `weight_decay`, all of them: titan's defaults are others.
        decays_norms: whether weight decay changes norms and biases, too.
    """
    name = str(config.value(source))
    kind, remark = "adamw", ADAMW.get(name)
    if name in ADAMW_8BIT and config.has("optimizer", "adamw_8bit", source, what="it is AdamW instead"):
        kind, remark = "adamw_8bit", ADAMW_8BIT[name]
    elif name in LION and config.has("optimizer", "lion", source, what="it is AdamW instead"):
        kind, remark = "lion", LION[name]
        values = {key: value for key, value in values.items() if key != "eps"}
    elif name == "muon" and config.has("optimizer", "muon", source, what="it is AdamW instead"):
        _muon(config, source, values)
        return
    elif remark is None and name not in (*ADAMW_8BIT, *LION, "muon"):
        config.lose(source, "titan has no such optimizer: it is AdamW instead (`titan list-components`)")
    config.recipe["optimizer"] = {"type": kind} | {key: float(value) for key, value in values.items()}
    if kind != "adamw" and config.recipe.get("training", {}).get("dtype") == "bfloat16":
        config.put("training.dtype", "float32")
        remark = "; ".join(filter(None, [remark, FLOAT32]))
    if remark:
        config.change(source, f"becomes {kind}: {remark}")
    config.take(*([] if source in config.handled() else [source]))
    if values["weight_decay"] and not decays_norms and not config.recipe.get("converters"):
        if kind == "adamw":
            config.put("optimizer.no_decay", ["*norm*"])
        else:
            config.change(source, "weight decay changes norms, too, which it does not there")


def _muon(config: Config, source: str, values: dict[str, float]) -> None:
    rest = {"type": "adamw"} | {key: float(value) for key, value in values.items()}
    config.put(
        "optimizer",
        {
            "type": "muon",
            "lr": float(values["lr"]),
            "weight_decay": float(values["weight_decay"]),
            "fallback": rest,
        },
    )
    config.change(source, "embeddings, norms and the output are stepped by AdamW (optimizer.fallback)")


def by_name(config: Config, source: str, embedding: str) -> None:
    """Give the B of adapters, and DoRA's magnitudes, a rate of their own: LoRA+, as peft has it.

    Args:
        embedding: the key with the rate of an embedding's adapter.
    """
    adapters = next((t for t in config.recipe.get("converters", []) if t["type"] in ("lora", "qlora")), None)
    if adapters is None or not config.value(source):
        config.ignore(source, embedding)
        return
    if not config.has("optimizer", "by_name", source):
        return
    inner = config.recipe["optimizer"]
    faster = ["*.lora_b", *(["*.lora_magnitude"] if adapters.get("dora") else [])]
    groups = [{"match": faster, "lr_factor": float(config.value(source))}]
    if "tok_embeddings" in (adapters.get("targets") or []):
        factor = float(config.value(embedding)) / (inner["lr"] or 1.0)
        groups.insert(0, {"match": ["tok_embeddings.lora_*"], "lr_factor": factor})
        config.take(embedding)
    config.ignore(embedding)
    config.recipe["optimizer"] = {"type": "by_name", "optimizer": inner, "groups": groups}
    config.take(source)


# ------------------------------------------------------------------------------------------------ schedules


def schedule(config: Config, shape: str, warmup: dict[str, Any] | None = None, **more: Any) -> None:
    """Set the learning rates.

    Args:
        shape: `linear`, `cosine`, `constant` or `inverse_sqrt`.
        warmup: keys of the schedule `from_zero` for the warm-up; None: there is none.
        more: further keys of it.
    """
    warmup = {key: value for key, value in (warmup or {}).items() if value or key == "warmup_ratio"}
    plain = not warmup and set(more) <= {"min_lr_factor"} and shape != "inverse_sqrt"
    if not plain:
        config.recipe["lr_scheduler"] = {"type": "from_zero", "shape": shape, **warmup, **more}
    elif shape == "constant":
        config.recipe["lr_scheduler"] = {"warmup_steps": 0, "decay_ratio": 0.0}
    else:
        config.recipe["lr_scheduler"] = {"warmup_steps": 0, "decay_type": shape, **more}


# -------------------------------------------------------------------------------------------------- batches


def batch(config: Config, micro: str, accumulated: str, rows: int = 1, ranks: int = 1) -> None:
    """Set the rows of a step. There, each GPU has its own; here, a step has a number of rows.

    Args:
        rows: rows of a batch that one example takes: 2 for pairs.
        ranks: data-parallel ranks that the config itself names.
    """
    own, times = int(config.value(micro)), int(config.value(accumulated) or 1)
    if own < 1 or times < 1:
        config.lose(micro if own < 1 else accumulated, "a batch has at least one row")
        own, times = max(own, 1), max(times, 1)
    config.put("training.local_batch_size", own * rows)
    config.take(*(name for name in (micro, accumulated) if name not in config.handled()))
    if rows > 1 and config.written(micro):
        config.change(micro, f"training.local_batch_size = {own * rows}: a pair takes two rows")
    if times > 1:
        count = max(config.asked.gpus, ranks)
        total = own * times * count * rows
        config.put("training.global_batch_size", total)
        gpus = "1 GPU (--gpus N says how many it ran on)" if count == 1 else f"{count} GPUs"
        config.change(
            accumulated if config.written(accumulated) else micro,
            f"training.global_batch_size = {total}: {own * rows} rows x {times} steps x {gpus}",
        )


def per_epoch(config: Config, source: str, key: str, epochs: float, steps: int | None) -> None:
    """Translate how often something happens in an epoch to steps, if the steps are known."""
    times = config.value(source)
    if not times:
        config.ignore(source)
    elif steps is None or epochs <= 0:
        config.lose(source, f"the steps of an epoch are known when the run counts its rows: set {key}")
    else:
        config.put(key, max(1, math.ceil(steps / (times * epochs))))
        config.change(source, f"{key} = {max(1, math.ceil(steps / (times * epochs)))}, of {steps} steps")


# --------------------------------------------------------------------------------------------------- splits

SLICE = re.compile(r"(?P<name>[\w.-]+)(\[(?P<first>\d+)?(?P<p1>%)?:(?P<last>\d+)?(?P<p2>%)?\])?\Z")


def held_out(split: str, size: float) -> tuple[str, str] | None:
    """Return the splits to train and to validate on, if the last rows of `split` are held out.

    Args:
        size: a fraction below 1, or a number of rows.

    Returns:
        None if there are no such splits: `datasets` cuts at whole percents, or whole rows.
    """
    match = SLICE.match(split)
    if match is None:
        return None
    name, first, last = match["name"], match["first"] or "", match["last"]
    if size >= 1:
        if last is None and not match["p1"]:
            count = int(size)
            return f"{name}[{first}:-{count}]", f"{name}[-{count}:]"
        if last is not None and not match["p2"]:
            cut = int(last) - int(size)
            return (f"{name}[{first}:{cut}]", f"{name}[{cut}:{last}]") if cut > int(first or 0) else None
        return None
    percent = match["p2"] or last is None
    low, high = int(first or 0), int(last) if last is not None else 100
    if not percent or (first and not match["p1"]):
        return None
    middle = high - (high - low) * size
    if abs(middle - round(middle)) > 1e-6 or not low < round(middle) < high:
        return None
    cut, start = round(middle), f"{first}%" if first else ""
    end = f"{last}%" if last is not None else ""
    return f"{name}[{start}:{cut}%]", f"{name}[{cut}%:{end}]"


def place(path: str) -> str:
    """Return a path of data as a recipe names it: a local one begins with `./`, a Hub name does not."""
    local = path.startswith(("/", "./", "../", "~"))
    if local or (HUB.match(path) and not os.path.exists(path) and not _is_file(path)):
        return path
    return path if "/" not in path and not _is_file(path) and not os.path.exists(path) else f"./{path}"


def _is_file(path: str) -> bool:
    return path.endswith((".json", ".jsonl", ".csv", ".parquet", ".txt", ".gz", ".zst", ".arrow"))


def offloading(config: Config, source: str) -> None:
    """Have activations wait in host memory where a setting says so."""
    if not config.value(source):
        config.ignore(source)
    elif config.has("callback", "activation_offload", source):
        config.recipe.setdefault("callbacks", []).append({"type": "activation_offload"})
        config.take(source)
