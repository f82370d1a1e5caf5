"""Any config.json of transformers: unsupported keys, and its form in a recipe. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.files import read_json
from titancli.models.config_json import kernels_of_the_hub
from titancli.models.quantization import KEY, quantization_of

NULL = "null"
"""Stands for JSON's null, which TOML does not have."""


TEXT_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Types of text models that equal another type if they only see text: RoPE over rows and columns of an
image then counts tokens."""
FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Types whose config.json may have the text model's keys at the top level."""
NAMED_OTHERWISE = (("language_model.", ""), ("model.language_model.", "model."))
"""Prefixes of tensor names in a multimodal folder, and in one of the text model alone."""
BESIDE_TEXT = re.compile(
    r"(model\.)?(vision\w*|visual|audio\w*|embed_vision|embed_audio|multi_modal_projector|mm_projector|"
    r"patch_merger|image_newline)(\.|$)"
)
"""Names of tensors that text does not pass through."""


def text_part(values: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's part of a config.json, or all of it if it describes nothing else."""
    text, kind = values.get("text_config"), values.get("model_type")
    if isinstance(text, dict) and isinstance(text.get("model_type"), str):
        # Keys at the top level take precedence, as in transformers.
        text = text | {key: values[key] for key in (KEY, "tie_word_embeddings") if key in values}
    elif kind in FLAT and isinstance(values.get("hidden_size"), int):
        others = ("text_config", "vision_config", "auto_map", "architectures")
        text = {key: value for key, value in values.items() if key not in others}
        text["model_type"] = FLAT[kind]
    else:
        return values
    if text["model_type"] not in TEXT_TYPES:
        return text
    text["model_type"] = TEXT_TYPES[text["model_type"]]
    return {key: _counting_tokens(value) if key in ROPES else value for key, value in text.items()}


ROPES = ("rope_scaling", "rope_parameters")


def _counting_tokens(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}


def faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of a config.json that can be found without transformers."""
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


def growing_rope(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the RoPE types whose frequencies depend on other rows in the batch, and the length from which
    they do."""
    ropes = values.get("rope_parameters") or values.get("rope_scaling") or {}
    longest = first(values, "max_position_embeddings")
    for table in (ropes, *(row for row in ropes.values() if isinstance(row, dict))):
        kind = table.get("rope_type") or table.get("type") or ""
        length = longest
        if kind in ("longrope", "su"):
            length = first({**table, **values}, "original_max_position_embeddings") or longest
        elif "dynamic" not in kind:
            continue
        if length is not None:
            yield kind, length


def encoded(value: Any) -> Any:
    """Return JSON data in a form that a recipe can hold."""
    if isinstance(value, dict):
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [encoded(item) for item in value]
    return NULL if value is None else value


def decoded(value: Any) -> Any:
    """Invert `encoded`."""
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
        values = read_json(path)
    except FileNotFoundError as error:
        raise EnvironmentProblem(f"{folder} has no config.json") from error
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise EnvironmentProblem(f"{path} does not contain an object")
    return encoded(text_part(values))


def merged(lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(lower)
    for key, value in upper.items():
        below = both.get(key)
        both[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def first(values: Mapping[str, Any], *names: str) -> int | None:
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)
