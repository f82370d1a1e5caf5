"""Any config.json of transformers: what titan refuses of it, and how a recipe holds it. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.models.quantization import quantization_of

KERNEL_KEYS = {"attn_implementation", "experts_implementation"}
"""Keys that only say which kernels transformers uses; some begin with an underscore."""
NULL = "null"
"""What stands in a table for JSON's null, which TOML has not."""


def faults(values: Mapping[str, Any]) -> Iterator[str]:
    """What config.json asks for and is refused, as far as it can be told without transformers."""
    if not isinstance(values.get("model_type"), str):
        yield "config.json has no model_type"
        return
    if values.get("auto_map"):
        yield (
            "config.json refers to code that comes with the weights (auto_map), which titan does not "
            f"run; remove the key if transformers' own {values['model_type']} is meant"
        )
    for key, name in kernels_of_the_hub(values):
        yield (
            f"{key} = {name!r} names a kernel on the Hub, which is code that titan does not run; remove "
            f"the key"
        )
    try:
        quantization_of(values)
    except EnvironmentProblem as error:
        yield f"{error.message}; {error.hint}"
    if values.get("output_router_logits"):
        yield (
            "config.json enables the routers' own loss (output_router_logits), which titan does not "
            "add: set it to false"
        )
    if values.get("is_encoder_decoder"):
        yield f"{values['model_type']} is an encoder-decoder model, not a causal language model"


def kernels_of_the_hub(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the keys of config.json by which transformers would fetch a kernel from the Hub and run it."""
    for key, value in values.items():
        names = value.values() if isinstance(value, dict) else (value,)
        if str(key).lstrip("_") in KERNEL_KEYS:
            yield from ((key, name) for name in names if isinstance(name, str) and "/" in name)
        elif isinstance(value, dict):
            yield from kernels_of_the_hub(value)


def growing_rope(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The RoPE of which a row's frequencies depend on the rows beside it, and the tokens from which on."""
    told = values.get("rope_parameters") or values.get("rope_scaling") or {}
    longest = first(values, "max_position_embeddings")
    for table in (told, *(row for row in told.values() if isinstance(row, dict))):
        kind = table.get("rope_type") or table.get("type") or ""
        length = longest
        if kind in ("longrope", "su"):
            length = first({**table, **values}, "original_max_position_embeddings") or longest
        elif "dynamic" not in kind:
            continue
        if length is not None:
            yield kind, length


def encoded(value: Any) -> Any:
    """JSON's data as a recipe can hold it."""
    if isinstance(value, dict):
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [encoded(item) for item in value]
    return NULL if value is None else value


def decoded(value: Any) -> Any:
    """The inverse of `encoded`."""
    if isinstance(value, dict):
        return {key: decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decoded(item) for item in value]
    return None if value == NULL else value


def read_folder(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not folder.is_dir():
        raise EnvironmentProblem(f"folder {folder} does not exist")
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise EnvironmentProblem(f"{folder} has no config.json") from error
    except (OSError, ValueError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise EnvironmentProblem(f"{path} does not contain an object")
    return encoded(values)


def merged(lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(lower)
    for key, value in upper.items():
        below = both.get(key)
        both[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def first(values: Mapping[str, Any], *names: str) -> int | None:
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)
