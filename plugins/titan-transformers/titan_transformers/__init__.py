"""The config of any causal language model in transformers, defined by its config.json."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from titan_transformers.config_json import (
    decoded,
    encoded,
    faults,
    first,
    growing_rope,
    merged,
    read_folder,
    text_part,
)
from titancli import component, hookimpl
from titancli.errors import EnvironmentProblem, RecipeError, TitanError
from titancli.models.config_json import HARMLESS

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

PLAIN_ROPES = {"default", "linear", "llama3"}
"""RoPE types that do not depend on max_position_embeddings."""


class FolderOrTable:
    """Marks a table of config.json's keys, in place of which a folder with the file may be given.

    A folder's name is the table's `type`, like a component's; keys beside it take precedence. The folder is
    read together with the recipe: the lock file holds the table, so a run, and each of its checkpoints, knows
    its model even if the folder changes or disappears.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(_table, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, {"type": "object"}]}


@component(
    "model",
    "hf_causal_lm",
    target="titan_transformers.model:build",
    hf="titan_transformers.weights:FolderForm",
)
class HFCausalLM:
    """Any causal language model of transformers, defined by its config.json: its modules, titan's engine."""

    config: Annotated[Path | dict[str, Any], FolderOrTable()]
    """A folder with config.json; or the keys of such a file as a table, where "null" stands for null; or a
    table whose `type` is the folder, plus the keys to override."""

    mesh_degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    stage_ends = (("embeddings",), ("output",))

    @property
    def values(self) -> dict[str, Any]:
        """Return the text model's part of config.json.

        Raises:
            EnvironmentProblem: there is no such file.
        """
        table = read_folder(self.config) if isinstance(self.config, Path) else self.config
        return text_part(decoded(table))

    @staticmethod
    def from_config_json(config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of `[model]` for a `config.json`; for a multimodal model, those of its text model.

        Raises:
            EnvironmentProblem: the model has code beside its weights, an unsupported quantization, or an
                encoder.
        """
        values = text_part(dict(config_json))
        for fault in faults(values):
            raise EnvironmentProblem(fault)
        return {"config": encoded(values)}

    def explicit(self) -> HFCausalLM:
        """Return the config without keys that do not change the computation; with the architecture's
        defaults if transformers is already imported."""
        values = self.values
        if "transformers" in sys.modules:
            from titan_transformers.theirs import hf_config

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

    def small(self) -> HFCausalLM:
        """Return a small copy for `titan prove`; see `titan_transformers.tiny`."""
        from titan_transformers.tiny import tiny

        return HFCausalLM(config=encoded(tiny(self.values)))

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
                    f"training.seq_len {recipe.training.seq_len} is beyond {length}: beyond it, RoPE of "
                    f"the type {kind} depends on the longest row in a batch",
                )
        exports = recipe.checkpoint.last_save_in_hf
        mesh = recipe.mesh
        degrees = (mesh.tp, mesh.cp, mesh.pp)
        if wrong or not (exports or mesh.ep != 1 or degrees != (1, 1, 1)):
            return
        # Only transformers knows, and asking it takes seconds, which others should not wait for.
        from titan_transformers.conversion import weights_fault
        from titan_transformers.parts import experts_fault

        if degrees != (1, 1, 1):
            try:
                faults_by_degree = self._on_meta().mesh_faults
            except RecipeError as error:
                yield "config", error.message.removeprefix("model.config: ")
                return
            for degree, reason in faults_by_degree.items():
                if (ranks := getattr(mesh, degree)) != 1:
                    yield "config", f"mesh.{degree} = {ranks}: {reason}"
        if mesh.ep != 1 and (fault := experts_fault(values)):
            yield "config", f"mesh.ep = {mesh.ep}: {fault}"
        if exports and (fault := weights_fault(values)):
            yield "config", f"checkpoint.last_save_in_hf: {fault}"

    def try_out(self) -> None:
        """Build the model on meta, which also tests a tiny copy of it. Imports torch; takes seconds.

        Raises:
            RecipeError: titan cannot train it.
        """
        self._on_meta()

    def _on_meta(self) -> Any:
        import torch

        from titancli.registry.component import build

        with torch.device("meta"):
            return build(self, seq_len=1)

    # ------------------------------------------------------------------------------------------- sizes
    # By transformers' usual names. None if config.json leaves them to the architecture's defaults.

    @property
    def n_heads(self) -> int | None:
        """Number of query heads."""
        return first(self.values, "num_attention_heads", "n_head")

    @property
    def n_kv_heads(self) -> int | None:
        """Number of key and value heads."""
        return first(self.values, "num_key_value_heads")

    @property
    def n_layers(self) -> int | None:
        """Number of blocks."""
        return first(self.values, "num_hidden_layers", "n_layer", "num_layers")

    @property
    def dim(self) -> int | None:
        """Width of hidden states."""
        return first(self.values, "hidden_size", "n_embd", "d_model")

    @property
    def n_experts(self) -> int | None:
        """Number of routed experts per layer."""
        names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        return first(self.values, *names)

    @property
    def hidden_dim(self) -> int | None:
        """Hidden dimension of the feed-forward block."""
        return first(self.values, "intermediate_size")

    @property
    def vocab_size(self) -> int | None:
        """Number of rows of the embedding."""
        return first(self.values, "vocab_size")

    @property
    def max_seq_len(self) -> int | None:
        """Maximum length of a row."""
        return first(self.values, "max_position_embeddings", "n_positions")


def _table(value: Any) -> Any:
    """Replace a folder by its table. Raises errors that pydantic handles."""
    above = value if isinstance(value, dict) else {"type": value}
    if not isinstance(above.get("type"), str):
        return value
    try:
        return merged(read_folder(Path(above["type"])), {k: v for k, v in above.items() if k != "type"})
    except TitanError as error:
        raise ValueError(error.message) from error


@hookimpl
def titan_components() -> list[type]:
    return [HFCausalLM]


@hookimpl
def titan_recipes() -> Path:
    return Path(__file__).parent / "recipes"
