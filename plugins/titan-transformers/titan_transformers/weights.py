"""The Hugging Face form of transformers' models."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from titan_transformers import HFCausalLM
from titan_transformers.config_json import BESIDE_TEXT, NAMED_OTHERWISE
from titan_transformers.conversion import Conversion, no_form, sources_of
from titan_transformers.model import TransformersModel
from titancli.errors import EnvironmentProblem
from titancli.models.blocks.state import named_state
from titancli.models.names import JOINED_EXPERTS
from titancli.models.quantization import KEY
from titancli.protocols import HFFormDefaults

logger = logging.getLogger(f"titancli.plugins.{__name__}")


class FolderForm(HFFormDefaults):
    """The Hugging Face form of a model of transformers.

    It claims no model_type by default: a folder's own family takes precedence.
    """

    model_types: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: HFCausalLM) -> None:
        self.config = config
        self.values = config.values
        self._copies: dict[str, str] | None = None
        self._ignored: list[str] = []
        self._warned: set[str] = set()
        self._conversion: Conversion
        self._sources: dict[str, list[str]] = {}

    @property
    def model_type(self) -> str:
        return self.values["model_type"]

    def sources(self, name: str) -> list[str]:
        self._look()
        return self._sources[name]

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        self._look()
        return self._conversion.to_files(name, tensor)

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        self._look()
        return self._conversion.from_files(name, zip(self._sources[name], tensors, strict=True))

    @property
    def prefix(self) -> str:  # type: ignore[override]  # the default is an attribute
        self._look()
        return self._prefix

    def known_as(self, hf_name: str) -> str:
        """Return a name as in a folder of the text model alone."""
        for start, ours in NAMED_OTHERWISE:
            if hf_name.startswith(start):
                return ours + hf_name.removeprefix(start)
        return hf_name

    def ignored(self, hf_name: str) -> bool:
        if found := BESIDE_TEXT.match(hf_name):
            self._warn(f"ignoring tensors outside the text model: {found[0]}")
            return True
        if self.model_type == "qwen3_moe" and hf_name.endswith(".mlp.experts.gate_up_proj"):
            raise EnvironmentProblem(JOINED_EXPERTS[0], hint=JOINED_EXPERTS[1])
        self._look()
        return self.copy_of(hf_name) is not None or any(re.search(p, hf_name) for p in self._ignored)

    def copy_of(self, hf_name: str) -> str | None:
        self._look()
        return (self._copies or {}).get(hf_name)

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(what)

    def _look(self) -> None:
        """Determine the contents of a folder, once.

        Raises:
            EnvironmentProblem: a parameter and its tensors in a folder cannot be converted to each other.
        """
        if self._copies is not None:
            return
        with torch.device("meta"):
            model = TransformersModel(self.config)
        self._conversion = Conversion(model.whole)
        state = dict(named_state(model))
        try:
            self._sources = sources_of(self._conversion, state)
        except Exception as error:  # any error of transformers' rules
            raise EnvironmentProblem(
                no_form(self.model_type, error),
                hint="use a model family that reads it (titan list-components model); training from "
                "scratch, checkpoints and generation need no such folder",
            ) from error
        self._prefix = f"{model.whole.base_model_prefix}."
        head = f"{model.head_name}.weight"
        name_of = {id(p): name for name, p in model.named_parameters()}
        self._copies = {head: name_of[id(model.output.weight)]} if model.tied else {}
        buffers = [re.escape(name) + "$" for name, _ in model.named_buffers() if name not in state]
        self._ignored = [r"rotary_emb\.inv_freq$", *buffers]
        self._ignored += getattr(model.base, "_keys_to_ignore_on_load_unexpected", None) or []

    def config_json(self) -> dict[str, Any]:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        left_out = ("torch_dtype", "dtype", KEY, "transformers_version", "_name_or_path")
        kept = {key: value for key, value in self.values.items() if key not in left_out}
        return {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type]], **kept}

    from_config_json = staticmethod(HFCausalLM.from_config_json)
