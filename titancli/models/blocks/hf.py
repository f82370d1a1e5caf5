"""The Hugging Face form of every decoder, from its config's names (`titancli.models.names`) and table
(`titancli.models.config_json`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titancli.errors import EnvironmentProblem
from titancli.models.names import EXPERT_BIAS, GATE, MTP_COPIES, TOP, Pairs, Source, Swap
from titancli.protocols import HFFormDefaults

if TYPE_CHECKING:
    from titancli.models.sections import Sizes

logger = logging.getLogger(__name__)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DecoderHF(HFFormDefaults):
    """A model with transformers' parameter names; experts are stacked here and may be separate there.

    Folders that have no place for the experts' balancing biases lose them; where folders always have one, a
    model without balancing reads and writes zeros.
    """

    prefix = "model."

    def __init__(self, config: Sizes) -> None:
        self.config: Any = config
        self.model_type = config.model_type
        names = TOP | dict(config.hf_names())
        self._layer = {
            ours: Source(theirs) if isinstance(theirs, str) else theirs for ours, theirs in names.items()
        }
        self._top = {ours: self._layer.pop(ours).theirs for ours in TOP}
        self._warned: set[str] = set()

    # ------------------------------------------------------------------------------------------ tensors

    def source(self, name: str) -> Source:
        """Return the source of a parameter: its name in the folder, and the steps that convert it."""
        if name in self._top:
            return Source(self._top[name])
        _, layer, rest = name.split(".", 2)
        found = self._layer[rest]
        return Source(f"model.layers.{layer}.{found.theirs}", found.steps)

    def sources(self, name: str) -> list[str]:
        if self._loses(name):
            return []
        theirs = self.source(name).theirs
        found = [theirs]
        if "{}" in theirs:
            found = [theirs.format(number) for number in range(self.config.moe.num_experts)]
        return [*found, self._bias_of(name)] if self._brings_bias(name) else found

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if self._loses(name):
            if not tensor.is_meta and bool(tensor.any()):
                self._warn(
                    "a Hugging Face folder cannot hold the biases that balance the experts: without them, "
                    "tokens near the border between two experts may be routed to the other one"
                )
            return []
        if name.endswith(EXPERT_BIAS):
            tensor = tensor.float()  # its updates are too small for lower precision
        source = self.source(name)
        for step in reversed(source.steps):
            tensor = _swapped(tensor, step) if isinstance(step, Swap) else _to_pairs(tensor, step)
        pieces = list(tensor.unbind()) if "{}" in source.theirs else [tensor]
        if self._brings_bias(name):
            pieces.append(torch.zeros(len(tensor), dtype=torch.float32, device=tensor.device))
        return [
            *zip(self.sources(name), pieces, strict=True),
            *((copy, tensor) for copy in self._copies(name)),
        ]

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        if self._loses(name):
            return torch.zeros(self.config.moe.num_experts)
        if self._brings_bias(name):
            *tensors, bias = tensors
            if not bias.is_meta and bool(bias.any()):
                raise EnvironmentProblem(
                    f"{self._bias_of(name)} is not zero, but this model has no such bias",
                    hint="set model.moe.load_balance_coeff = 0.001, and model.moe.freeze_expert_bias = true "
                    "to keep the bias as it is",
                )
        source = self.source(name)
        tensor = torch.stack(tensors) if "{}" in source.theirs else tensors[0]
        for step in source.steps:
            tensor = _swapped(tensor, step) if isinstance(step, Swap) else _from_pairs(tensor, step)
        return tensor

    def ignored(self, hf_name: str) -> bool:
        if self.copy_of(hf_name) is not None or hf_name.endswith("rotary_emb.inv_freq"):
            return True
        layer = _LAYER.match(hf_name)
        if layer is None or int(layer[1]) < self.config.n_layers + (self._mtp_layers or 0):
            return hf_name.startswith(self.config.other_parts)
        if self._mtp_layers is None:
            return False
        self._warn(
            f"the layers beyond the {self.config.n_layers + self._mtp_layers} of the model, which predict "
            f"further tokens, are left out: model.n_mtp_layers is {self._mtp_layers}"
        )
        return True

    def why_missing(self, hf_names: Collection[str]) -> str | None:
        layers = [int(found[1]) for name in hf_names if (found := _LAYER.match(name))]
        if self._mtp_layers and layers and min(layers) >= self.config.n_layers:
            return (
                "the layers that predict further tokens are not in this folder (transformers leaves them out "
                f"when it saves): set model.n_mtp_layers = {min(layers) - self.config.n_layers}"
            )
        if list(hf_names) == [self._top["output.weight"]]:
            return (
                "this is a folder of the model without its output layer: use one that was saved from "
                "transformers' …ForCausalLM, or set model.tied = true if the embeddings are the output layer"
            )
        return None

    def whole(self, hf_names: Collection[str]) -> dict[str, Any]:
        layers = {int(found[1]) for name in hf_names if (found := _LAYER.match(name))}
        further = sum(layer >= self.config.n_layers for layer in layers)
        return {"n_mtp_layers": further} if further and self._mtp_layers == 0 else {}

    @property
    def _mtp_layers(self) -> int | None:
        """Number of multi-token prediction layers; None: the family has none."""
        return getattr(self.config, "n_mtp_layers", None)

    def _copies(self, name: str) -> list[str]:
        """Return further names of a parameter in the folder: each multi-token prediction layer has a copy."""
        ends = [end for end, of in MTP_COPIES.items() if self._stored(of) == name]
        first, count = self.config.n_layers, self._mtp_layers or 0
        return [f"model.layers.{number}.{end}" for number in range(first, first + count) for end in ends]

    def _stored(self, name: str) -> str:
        return "tok_embeddings.weight" if self.config.tied and name == "output.weight" else name

    def copy_of(self, hf_name: str) -> str | None:
        if self.config.tied and hf_name == self._top["output.weight"]:
            return self._top["tok_embeddings.weight"]
        layer = _LAYER.match(hf_name)
        number = -1 if layer is None else int(layer[1]) - self.config.n_layers
        if layer is None or not 0 <= number < (self._mtp_layers or 0):
            return None
        original = MTP_COPIES.get(hf_name.removeprefix(layer[0]))
        return None if original is None else self._top[self._stored(original)]

    def known_as(self, hf_name: str) -> str:
        """Return a name as in a folder of the text model alone."""
        text = self.config.text_part
        if not hf_name.startswith(text):
            return hf_name
        inner = "model." if text.startswith("model.") else ""  # both have the prefix `model.`
        return inner + hf_name.removeprefix(text)

    # ------------------------------------------------------------------------------------------- biases

    @property
    def loses_biases(self) -> bool:  # type: ignore[override]  # the default is an attribute
        """Return whether the folder cannot store the balancing biases of experts."""
        return EXPERT_BIAS not in self._layer

    def _loses(self, name: str) -> bool:
        return self.loses_biases and name.endswith(EXPERT_BIAS)

    def _brings_bias(self, name: str) -> bool:
        """Return whether a gate also stands for the bias: folders that store one always do, but a model
        without balancing has none."""
        return name.endswith(GATE) and not self.loses_biases and not self.config.moe.load_balance_coeff

    def _bias_of(self, gate: str) -> str:
        return self.source(gate.replace(GATE, EXPERT_BIAS)).theirs

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(what)

    # ------------------------------------------------------------------------------------------- config

    def config_json(self) -> dict[str, Any]:
        return self.config.hf_tables[self.model_type].write(self.model_type, self.config.explicit())


def _swapped(x: Tensor, step: Swap) -> Tensor:
    return x.transpose(step.first, step.second).contiguous()


def _from_pairs(x: Tensor, step: Pairs) -> Tensor:
    return _turned(x, step, (-1, 2))


def _to_pairs(x: Tensor, step: Pairs) -> Tensor:
    return _turned(x, step, (2, -1))


def _turned(x: Tensor, step: Pairs, halves: tuple[int, int]) -> Tensor:
    """Swap the two dimensions that `halves` unflattens pairs into."""
    dim, size = step.dim, step.group or x.shape[step.dim]
    groups, at = x.unflatten(dim, (-1, size)), dim + 1
    kept, turned = groups.split((size - (step.last or size), step.last or size), at)
    turned = turned.unflatten(at, halves).transpose(at, at + 1).flatten(at, at + 1)
    return (torch.cat((kept, turned), at) if kept.shape[at] else turned).flatten(dim, at)
