"""transformers' config and model for a config.json's values, with errors in titan's terms."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from titan_transformers.config_json import faults
from titan_transformers.tiny import tiny
from titancli.errors import RecipeError
from titancli.models.config_json import KERNEL_KEYS
from titancli.models.quantization import KEY


def refused(values: Mapping[str, Any], what: str, hint: str | None = None) -> RecipeError:
    return RecipeError(f"model.config: {values.get('model_type')}: {what}", hint=hint)


def hf_config(values: Mapping[str, Any]) -> Any:
    """Return transformers' config of these values.

    Raises:
        RecipeError: the values are not supported, or unknown to transformers.
    """
    with quiet():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for fault in faults(values):
        raise RecipeError(f"model.config: {fault}")
    if values["model_type"] not in CONFIG_MAPPING:
        import transformers

        raise refused(values, f"transformers {transformers.__version__} has no such model")
    try:
        with quiet():
            # titan chooses kernels; transformers would download some. Weights are read unquantized, whatever
            # the folder's format.
            left_out = {*KERNEL_KEYS, KEY}
            chosen = {key: value for key, value in values.items() if str(key).lstrip("_") not in left_out}
            kind: Any = CONFIG_MAPPING[values["model_type"]]
            return kind.from_dict(kind._decode_special_floats(chosen))  # infinity, which JSON does not have
    except Exception as error:  # any error is caused by the given values
        raise refused(values, f"transformers rejects this config: {line_of(error)}") from error


def whole_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with transformers' defaults."""
    return hf_config(values).to_dict() | {"model_type": values["model_type"]}


def tiny_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a tiny copy (`titan_transformers.tiny`)."""
    return tiny(whole_values(values))


def made(values: Mapping[str, Any], attention: str, experts: str) -> Any:
    """Return transformers' model on meta, in float32.

    Args:
        attention, experts: names of their functions in transformers' tables.

    Raises:
        RecipeError: there is no such model.
    """
    config = hf_config(values)
    with quiet():
        from transformers import AutoModelForCausalLM

        kind: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None:
        raise refused(values, "transformers has no causal language model of this type")
    if config.get_text_config() is not config:
        raise refused(
            values,
            "a multimodal model whose config.json does not say which text model it has",
        )
    try:
        with quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:  # any error is caused by the given values
        raise refused(values, f"transformers cannot build it: {line_of(error)}") from error
    # Not passed to the constructor: a model declares support only for transformers' own functions.
    choose(model, attention, experts)
    return model


def choose(model: Any, attention: str, experts: str) -> None:
    """Select the attention and experts functions of a model's modules."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation, config._experts_implementation = attention, experts


def line_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' warnings, for example about missing kernels."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
