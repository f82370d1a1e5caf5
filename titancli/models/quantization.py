"""Quantization methods in a config.json, and which of them are supported. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titancli.errors import EnvironmentProblem

KEY = "quantization_config"
READ = "fp8 (e4m3, in blocks or per tensor), mxfp4, compressed-tensors (pack-quantized, symmetric int4)"
"""The supported methods, for messages."""
DEQUANTISE = (
    "use the unquantized original weights; or load these with transformers, call "
    "model.dequantize() and save_pretrained(NEW_FOLDER), and remove quantization_config from its config.json"
)
"""Hint for other quantized weights."""


@dataclass(frozen=True)
class Quantization:
    """A supported way of quantizing."""

    method: str
    """Name in config.json: `fp8`, `mxfp4` or `compressed-tensors`."""
    block: tuple[int, int] | None = None
    """For fp8: rows and columns that share a scale; None: one scale for all."""
    groups: frozenset[int | None] = frozenset()
    """For compressed-tensors: possible numbers of values in a row that share a scale; None: all of a row."""


def quantization_of(config_json: Mapping[str, Any]) -> Quantization | None:
    """Return how the weights beside a config.json are quantized; None if they are not.

    Raises:
        EnvironmentProblem: the method, which it names, is not supported.
    """
    text = config_json.get("text_config")
    table = config_json.get(KEY) or (text.get(KEY) if isinstance(text, Mapping) else None)
    if not table:
        return None
    method = table.get("quant_method", "unknown") if isinstance(table, Mapping) else "unknown"
    check = {"fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed}.get(str(method), _unknown)
    try:
        found, other = check(table)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found, other = None, f"a malformed table ({type(error).__name__}: {error})"
    if found is None:
        raise EnvironmentProblem(
            f"config.json says that the weights are quantized with {method!r}{other and f', with {other}'}; "
            f"read are {READ}",
            hint=DEQUANTISE,
        )
    return found


Found = tuple[Quantization | None, str]
"""The quantization, or None with the reason."""


def _unknown(table: Any) -> Found:
    return None, ""


def _fp8(table: Mapping[str, Any]) -> Found:
    for key, good in (("fmt", ("e4m3", "float8_e4m3fn")), ("expert_dtype", ("fp8",))):
        if (value := table.get(key)) not in (None, *good):
            return None, f"{key} = {value!r}"
    block = table.get("weight_block_size", [128, 128])
    if block is None:
        return Quantization("fp8"), ""
    rows, columns = block
    if not all(isinstance(size, int) and size > 0 for size in block):
        return None, f"weight_block_size = {block!r}"
    return Quantization("fp8", (rows, columns)), ""


def _mxfp4(table: Mapping[str, Any]) -> Found:
    return Quantization("mxfp4"), ""


def _compressed(table: Mapping[str, Any]) -> Found:
    if (form := table.get("format")) != "pack-quantized":
        return None, f"format = {form!r}"
    if table.get("transform_config"):  # weights are rotated, and inputs must be as well
        return None, "a transform_config"
    groups: set[int | None] = set()
    for name, group in table["config_groups"].items():
        weights = group["weights"]
        wanted = {"num_bits": 4, "type": "int", "symmetric": True}
        other = {key: weights.get(key) for key, good in wanted.items() if weights.get(key) != good}
        if weights.get("strategy") not in ("group", "channel"):
            other["strategy"] = weights.get("strategy")
        size = weights.get("group_size") if weights.get("strategy") == "group" else None
        if weights.get("strategy") == "group" and not (isinstance(size, int) and size > 0):
            other["group_size"] = size
        if weights.get("actorder"):
            other["actorder"] = weights["actorder"]
        if group.get("format") not in (None, "pack-quantized"):
            other["format"] = group["format"]
        if other:
            said = ", ".join(f"{key} = {value!r}" for key, value in other.items())
            return None, f"{said} in {name}"
        groups.add(size)
    return Quantization("compressed-tensors", groups=frozenset(groups)), ""
