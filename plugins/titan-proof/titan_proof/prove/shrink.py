"""Make a small copy of a recipe: the same components and kinds of layers, with sizes that are fast on a CPU.

Sizes are known by the names that titan's own models use; a model with others declares its small copy
(`small`, see `titancli.registry.defaults.ModelConfigDefaults`). A change that the recipe's own checks refuse
is not made. Torch-free.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titancli import Recipe
from titancli.errors import RecipeError
from titancli.layout.stages import SCHEDULES
from titancli.recipe import DEFAULT, LOCK_HEADER, Loaded, Node, load_recipe, resolved_data
from titancli.recipe.schema import needs_dataset, needs_tokenizer, sections_with
from titancli.registry import current

ROWS, LENGTH, WIDTH, VOCABULARY, WINDOW = 8, 16, 64, 64, 6
"""Rows of a step, tokens of a row, width of the residual stream, rows of the embedding, and tokens of a
window: fewer than a row has, so that an error in a window shows."""
SINGLE = {
    "hidden_dim": 128,
    "moe.hidden_dim": 32,
    "moe.num_shared_experts": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": WINDOW,
    "fixed_attn_block_size": WINDOW,
    "attn_temperature.floor_scale": 4,
    "rope_scaling.original_max_position": 8,
    "yarn.original_max_position": 8,
}
"""Upper limits of sizes that do not depend on others."""
GONE = ("weights", "env", "debug")
"""Sections that do not affect a step on one rank in float32, beside those of running and watching."""


@dataclass(frozen=True)
class Small:
    """The small copy of a recipe."""

    file: Path
    """The recipe file, for one rank without any technique."""
    recipe: Recipe
    changed: dict[str, tuple[Any, Any]]
    """Keys of [model], and training.seq_len, whose values were made smaller: the old and the new value."""
    left_out: list[str]
    """Things that the proof does not cover, in words."""
    base: Path | None
    """The place to save the weights that converters start from; None if none do."""


def shrink(loaded: Loaded, folder: Path, device: str = "cpu") -> Small:
    """Write a small copy of a recipe into a folder, for a device.

    Raises:
        RecipeError: the copy is not valid, even with the original sizes.
    """
    data, left_out = _plain_settings(loaded, device)
    base = None
    if loaded.recipe.converters and loaded.recipe.weights is not None:
        base = folder / "base" / "step-0"
        data["weights"] = str(base)
    file = folder / "recipe.toml"
    lengths = [LENGTH, 2 * LENGTH, 4 * LENGTH, 8 * LENGTH, loaded.recipe.training.seq_len]
    if needs_dataset(loaded.recipe.loop) and not needs_tokenizer(loaded.recipe.dataset):
        del lengths[:-1]  # its rows have no tokens, and their length is fixed
    for length in lengths:
        data["training"]["seq_len"] = min(length, loaded.recipe.training.seq_len)
        if _valid(data, file) is not None:
            break
    recipe = _first_copy(data, file)
    kinds = _kinds(recipe)
    for alternatives in _moves(loaded.recipe, recipe):
        for move in alternatives:
            tried = copy.deepcopy(data)
            if not _apply(tried["model"], move):
                continue
            found = _valid(tried, file)
            if found is not None and _kinds(found) == kinds:
                data = tried
                break
    recipe = _load(data, file)
    changed = dict(_changes(loaded.data["model"], data["model"]))
    if (length := data["training"]["seq_len"]) != loaded.recipe.training.seq_len:
        changed["training.seq_len"] = (loaded.recipe.training.seq_len, length)
    return Small(file, recipe, changed, left_out, base)


def _plain_settings(loaded: Loaded, device: str) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe's data for one rank, in float32, without schedule, recomputation or compile; and
    what is not covered."""
    recipe, left_out = loaded.recipe, []
    gone = (*GONE, *sections_with("running", "watching"))
    data = {key: copy.deepcopy(value) for key, value in loaded.data.items() if key not in gone}
    data["model"].pop("flavor", None)
    small = recipe.model.small()
    if small is not None:
        data["model"] = _as_data(small)
    training = recipe.training
    if "bfloat16" in (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce):
        left_out.append("bfloat16 on most layouts: they are computed in float32")
    data["training"].pop("epochs", None)
    data["training"] |= {
        "steps": 10,
        "local_batch_size": ROWS,
        "global_batch_size": ROWS,
        "dtype": "float32",
        "mixed_precision_param": "float32",
        "mixed_precision_reduce": "float32",
        "max_norm": min(training.max_norm, 0.5),
        "seed": 0,
    }
    data["mesh"] = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1)
    pairs = recipe.loss.learns_from_pairs
    data["pipeline"] = {
        "schedule": recipe.pipeline.schedule,
        "microbatch_size": 2 if pairs else 1,
        "first_stage_less_layers": 0,
        "last_stage_less_layers": 0,
    }
    data["activation_checkpoint"] = {"mode": "none"}
    data["compile"]["enable"] = False
    data["lr_scheduler"] = {"type": "titan/wsd", "warmup_steps": 0, "decay_ratio": 0.0, "min_lr_factor": 1.0}
    data["stability"] = {"skip_nonfinite": False, "sigma": 0.0}
    data["checkpoint"] = {"enable": False}
    data["launcher"] = {"type": "titan/local"}
    if not needs_dataset(recipe.loop):  # a loop that makes its own rows has its own settings for their number
        data["loop"] = {"type": "titan/pretrain"}
        data["dataset"] = {"type": "titan/python_stdlib"}
    _steady(data["optimizer"])
    needs_gpu = recipe.parallelize.needs_gpu()
    for key, why in needs_gpu if device == "cpu" else ():
        data["parallelize"][key] = False
        left_out.append(f"parallelize.{key}: {why}")
    return data, left_out


def _as_data(config: Any) -> dict[str, Any]:
    return resolved_data(config, Node({}, DEFAULT), current())


def _steady(optimizer: dict[str, Any]) -> None:
    """Give an optimizer a learning rate large enough to show, and an eps large enough that it does not
    divide by rounding errors."""
    for key, value in optimizer.items():
        if isinstance(value, dict):
            _steady(value)
        elif key == "lr" and isinstance(value, float):
            optimizer[key] = 1e-2
        elif key == "eps" and isinstance(value, float):
            optimizer[key] = max(value, 1e-4)


def _moves(recipe: Recipe, small: Recipe) -> Iterator[list[dict[str, int]]]:
    """Yield changes of [model]; the first valid one of each list is made."""
    model = small.model
    # Of a weight that is stored in blocks, each of four ranks of tensor parallelism needs whole ones.
    block = max((getattr(one, "values_per_block", 1) for one in small.converters), default=1)
    blocks = {"hidden_dim": 4 * block, "moe.hidden_dim": 4 * block, "v_head_dim": block}
    yield from ([{key: max(most, blocks.get(key, 0))}] for key, most in SINGLE.items())
    heads, kv_heads = model.n_heads, model.n_kv_heads
    if heads:
        fewer_kv = math.gcd(kv_heads or heads, 4)
        fewer = fewer_kv * min(heads // (kv_heads or heads), 2)
        # Converters may need sizes that 16 divides on each of four ranks (float8).
        width = max(WIDTH // fewer, 16 if small.converters else 8, 4 * block // fewer)
        sizes = {"n_heads": fewer, **({"n_kv_heads": fewer_kv} if kv_heads else {})}
        yield [
            {**sizes, "dim": WIDTH, "head_dim": max(16, 4 * block // fewer)},
            {**sizes, "dim": fewer * width},
            {"dim": WIDTH},
        ]
    else:
        yield [{"dim": WIDTH}]
    if experts := model.n_experts:
        few = [n for n in (4, 8, 16, 32) if experts % n == 0]
        yield [
            {"moe.num_experts": n, "moe.top_k": k, **groups}
            for n in few
            for groups in (
                {"moe.num_expert_groups": 4, "moe.num_limited_groups": 2},
                {"moe.num_expert_groups": 2, "moe.num_limited_groups": 1},
                {},
            )
            for k in (2,)
            if n >= 4
        ]
    if model.n_layers:
        least = 2 * SCHEDULES[recipe.pipeline.schedule].usual_stages
        counts = [n for n in (2, 3, 4, 5, 6, 8, 12) if n >= least]
        yield [{"n_layers": n, **more} for n in counts for more in ({"n_dense_layers": 1}, {})]
    if vocabulary := model.vocab_size:
        yield [{"vocab_size": VOCABULARY + vocabulary % 4}]


def _apply(model: dict[str, Any], move: Mapping[str, int]) -> bool:
    """Make a change; return False if it changes nothing, or a key is missing. Nothing becomes larger."""
    smaller = False
    for key, value in move.items():
        *tables, last = key.split(".")
        table: Any = model
        for name in tables:
            table = table.get(name) if isinstance(table, dict) else None
        if not isinstance(table, dict) or not isinstance(table.get(last), int):
            return False
        smaller |= table[last] > value
        table[last] = min(value, table[last])
    return smaller


def _kinds(recipe: Recipe) -> int | None:
    """Return how many kinds of blocks the model has; None if it does not say."""
    shape = recipe.model.shape()
    return None if shape is None else len({repr(block) for block in shape.blocks})


def _first_copy(data: dict[str, Any], file: Path) -> Recipe:
    """Return the recipe with the settings of a proof, and its model's original sizes.

    Raises:
        RecipeError: it is not valid; the message names the values that its components refuse.
    """
    try:
        return _load(data, file)
    except RecipeError as error:
        lines = {p.message: f" ({p.location.source.strip()})" if p.location else "" for p in error.problems}
        found = [f"{message}{line}" for message, line in lines.items()]
        raise RecipeError(
            f"no small copy of this recipe is valid: {'; '.join(found)}",
            hint=f"a copy has rows of {data['training']['seq_len']} tokens, {ROWS} of them in a step, in "
            "float32 on one rank, and something in the recipe refuses these settings",
        ) from error


def _valid(data: dict[str, Any], file: Path) -> Recipe | None:
    try:
        return _load(data, file)
    except RecipeError:
        return None


def _load(data: dict[str, Any], file: Path) -> Recipe:
    import tomli_w

    # With a lock file's header, missing values are None.
    file.write_text(f"{LOCK_HEADER}\n{tomli_w.dumps(data)}", encoding="utf-8")
    return load_recipe(file).recipe


def _changes(before: Any, after: Any, path: str = "model") -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key, value in after.items():
        old = before.get(key) if isinstance(before, dict) else None
        if isinstance(value, dict):
            yield from _changes(old, value, f"{path}.{key}")
        elif old is not None and old != value:
            yield f"{path}.{key}", (old, value)


def largest_sizes(model: Mapping[str, Any], path: str = "model") -> list[tuple[int, str]]:
    """Return the integers of a table with their keys, the largest first."""
    found: list[tuple[int, str]] = []
    for key, value in model.items():
        if isinstance(value, dict):
            found += largest_sizes(value, f"{path}.{key}")
        elif isinstance(value, int) and not isinstance(value, bool) and key != "max_seq_len":
            found.append((value, f"{path}.{key}"))
    return sorted(found, reverse=True)
