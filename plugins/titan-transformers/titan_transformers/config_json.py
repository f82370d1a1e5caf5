"""Any config.json of transformers: what titan refuses of it, and how a recipe holds it. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.models.config_json import kernels_of_the_hub
from titancli.models.quantization import KEY, quantization_of

NULL = "null"
"""What stands in a table for JSON's null, which TOML has not."""


TEXT_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Types of text models that are other types where all that they see is text: RoPE by rows and columns of an
image counts tokens there."""
FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Types whose config.json may have the keys of its text model beside those of its others."""
NAMED_OTHERWISE = (("language_model.", ""), ("model.language_model.", "model."))
"""How names of tensors in a folder of more than a text model begin, and in one of the text model alone."""
BESIDE_TEXT = re.compile(
    r"(model\.)?(vision\w*|visual|audio\w*|embed_vision|embed_audio|multi_modal_projector|mm_projector|"
    r"patch_merger|image_newline)(\.|$)"
)
"""Names of tensors that text does not meet."""


def text_part(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of its text model; all that it says, where it describes nothing else."""
    text, kind = values.get("text_config"), values.get("model_type")
    if isinstance(text, dict) and isinstance(text.get("model_type"), str):
        # What is said of the whole holds, as in transformers.
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
    return encoded(text_part(values))


def merged(lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(lower)
    for key, value in upper.items():
        below = both.get(key)
        both[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def first(values: Mapping[str, Any], *names: str) -> int | None:
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)
