"""The config of any causal language model that transformers has: what its config.json says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from titancli.errors import EnvironmentProblem, TitanError
from titancli.models.config_json import HARMLESS
from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

PLAIN_ROPES = {"default", "linear", "llama3"}
"""Rotary embeddings that max_position_embeddings has no part in."""
KERNEL_KEYS = {"attn_implementation", "experts_implementation"}
"""Keys that only say which kernels transformers uses; some begin with an underscore."""
NULL = "null"
"""What stands in a table for JSON's null, which TOML has not."""


class FolderOrTable:
    """Marks a table of config.json's keys, for which a folder that has the file may stand.

    A folder's name is the table's `type`, as a component's is; keys beside it win. The folder is read when
    the recipe is: the lock file holds the table, so that a run, and each of its checkpoints, knows its model
    whatever becomes of the folder.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(_table, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, {"type": "object"}]}


@component(
    "model",
    "hf_causal_lm",
    target="titancli.models.hf_causal_lm:build",
    hf="titancli.models.hf_causal_lm:SameNames",
)
class HFCausalLM:
    """Any causal language model of transformers, by its config.json: its modules, titan's engine."""

    config: Annotated[Path | dict[str, Any], FolderOrTable()]
    """A folder with config.json; or the keys of such a file as a table, where "null" stands for null; or a
    table whose `type` is the folder, with the keys that are to be otherwise."""

    mesh_degrees = ("dp_replicate", "dp_shard", "tp")

    @property
    def values(self) -> dict[str, Any]:
        """What config.json says.

        Raises:
            EnvironmentProblem: there is no such file.
        """
        return decoded(_read(self.config) if isinstance(self.config, Path) else self.config)

    @staticmethod
    def from_config_json(config_json: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of `[model]` for a `config.json`.

        Raises:
            EnvironmentProblem: code that comes with the weights, quantised weights, an encoder.
        """
        for fault in faults(config_json):
            raise EnvironmentProblem(fault)
        return {"config": encoded(dict(config_json))}

    def explicit(self) -> HFCausalLM:
        """The same, without keys that do not change what is computed; with the architecture's defaults where
        transformers is there already to name them."""
        values = self.values
        if "transformers" in sys.modules:
            from titancli.models.blocks.hf_modules import hf_config

            values = hf_config(values).to_dict()
        ropes = (values.get("rope_parameters") or {}, values.get("rope_scaling") or {})
        kinds = {rope.get("rope_type", rope.get("type", "default")) for rope in ropes}
        harmless = HARMLESS if kinds <= PLAIN_ROPES else HARMLESS - {"max_position_embeddings"}
        kept = {
            key: value
            for key, value in values.items()
            if key not in harmless and not key.startswith("_") and not re.search("dropout|pdrop", key)
        }
        return HFCausalLM(config=encoded(kept))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        values = self.values
        wrong = list(faults(values))
        yield from (("config", fault) for fault in wrong)
        if self.max_seq_len is not None and recipe.training.seq_len > self.max_seq_len:
            message = f"training.seq_len {recipe.training.seq_len} is beyond the model's {self.max_seq_len}"
            yield "config", message
        for kind, length in growing_rope(values):
            if recipe.training.seq_len > length:
                yield (
                    "config",
                    f"training.seq_len {recipe.training.seq_len} is beyond {length}: from there on RoPE of "
                    f"the type {kind} depends on the longest row in a batch",
                )
        exports = recipe.checkpoint.last_save_in_hf
        if wrong or not (exports or recipe.mesh.tp > 1):
            return
        # Only transformers knows, and to ask it takes seconds; nobody else waits for it.
        from titancli.models.blocks.hf_modules import conversion_fault, plan_fault

        if recipe.mesh.tp > 1 and (fault := plan_fault(values)):
            yield "config", f"mesh.tp = {recipe.mesh.tp}: {fault}"
        if exports and (fault := conversion_fault(values)):
            yield "config", f"checkpoint.last_save_in_hf: {fault}"

    def try_out(self) -> None:
        """Build the model on meta, and with that try it on a tiny copy. Imports torch; takes seconds.

        Raises:
            RecipeError: titan cannot train it.
        """
        import torch

        from titancli.registry.component import build

        with torch.device("meta"):
            build(self, seq_len=1)

    # ------------------------------------------------------------------------------------------- sizes
    # By transformers' usual names. None where config.json leaves them to the architecture's defaults.

    @property
    def n_heads(self) -> int | None:
        """Query heads."""
        return _first(self.values, "num_attention_heads", "n_head")

    @property
    def n_kv_heads(self) -> int | None:
        """Key and value heads."""
        return _first(self.values, "num_key_value_heads")

    @property
    def hidden_dim(self) -> int | None:
        """Width inside the feed-forward block."""
        return _first(self.values, "intermediate_size")

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding."""
        return _first(self.values, "vocab_size")

    @property
    def max_seq_len(self) -> int | None:
        """The longest row that it is meant for."""
        return _first(self.values, "max_position_embeddings", "n_positions")


def faults(values: Mapping[str, Any]) -> Iterator[str]:
    """What config.json asks for and is refused, as far as it can be told without transformers."""
    if not isinstance(values.get("model_type"), str):
        yield "config.json names no model_type"
        return
    if values.get("auto_map"):
        yield (
            "config.json names code that comes with the weights (auto_map), which titan does not run; "
            f"take the key away, if transformers' own {values['model_type']} is meant"
        )
    for key, name in kernels_of_the_hub(values):
        yield (
            f"{key} = {name!r} names a kernel on the Hub, which is code, and titan does not run it; "
            "take the key away"
        )
    if quantised := values.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        yield (
            f"config.json says that the weights are quantised by {method!r}, and such weights are not "
            "trained; take those that they were made from"
        )
    if values.get("output_router_logits"):
        yield "config.json wants the routers' own loss (output_router_logits), and titan adds none: say false"
    if values.get("is_encoder_decoder"):
        yield f"{values['model_type']} is an encoder with a decoder, and no causal language model"


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
    longest = _first(values, "max_position_embeddings")
    for table in (told, *(row for row in told.values() if isinstance(row, dict))):
        kind = table.get("rope_type") or table.get("type") or ""
        length = longest
        if kind in ("longrope", "su"):
            length = _first({**table, **values}, "original_max_position_embeddings") or longest
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


def _table(value: Any) -> Any:
    """A folder's table in place of the folder. Errors are those that pydantic takes."""
    above = value if isinstance(value, dict) else {"type": value}
    if not isinstance(above.get("type"), str):
        return value
    try:
        return _merged(_read(Path(above["type"])), {k: v for k, v in above.items() if k != "type"})
    except TitanError as error:
        raise ValueError(error.message) from error


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not folder.is_dir():
        raise EnvironmentProblem(f"there is no folder {folder}")
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise EnvironmentProblem(f"{folder} has no config.json") from error
    except (OSError, ValueError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise EnvironmentProblem(f"{path} holds no object")
    return encoded(values)


def _merged(lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(lower)
    for key, value in upper.items():
        below = both.get(key)
        both[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def _first(values: Mapping[str, Any], *names: str) -> int | None:
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)
