"""The Hugging Face forms of models with these heads, in place of the language model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from titancli.errors import EnvironmentProblem, UsageError
from titancli.protocols import HFForm

SCORE = {"loss.score.weight": "score.weight"}
"""Names in a folder, by those of the model's parameters."""
OUTPUT = "output."
"""Prefix of the parameters that such folders lack."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Head:
    """What takes the place of a language model's output layer."""

    table: str
    """The table of transformers with its class for each model type."""
    loader: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of config.json."""


def classifier(classes: list[str], problem_type: str, pad_id: int | None) -> Head:
    """Return the head of `…ForSequenceClassification`, with one logit for each of the classes.

    Args:
        pad_id: `pad_token_id`; None: that of the folder that the weights once came from.
    """
    entries: dict[str, Any] = {
        "num_labels": len(classes),
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
        "problem_type": problem_type,
    }
    if pad_id is not None:
        entries["pad_token_id"] = pad_id
    table = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    return Head(table, "AutoModelForSequenceClassification", SCORE, entries)


BASE = Head("MODEL_MAPPING_NAMES", "AutoModel")
"""The model without an output layer, as `LlamaModel`."""


def form_of(form: HFForm, head: Head, shapes: Shapes, config_json: Mapping[str, Any] | None) -> Any:
    """Return the form of folders of a model with a head.

    Args:
        form: of the language model.
        shapes: of the model's parameters.
        config_json: of a folder that is read, which may be a language model's; None: one is written.

    Raises:
        UsageError: transformers has no class for it.
        EnvironmentProblem: the head in the folder has outputs of other names.
    """
    own = form.config_json()
    if config_json is None:
        return WithHead(form, head, _class(head.table, own), shapes)
    named = config_json.get("architectures")
    if named in (None, own.get("architectures")):
        return form
    found = WithHead(form, head, _class(head.table, own), shapes)
    if named != found.config_json()["architectures"]:
        return form
    ours, theirs = ([*(one.get("id2label") or {}).values()] for one in (head.config, config_json))
    mean_something = len(theirs) > 1 and not all(str(name).startswith("LABEL_") for name in theirs)
    if mean_something and ours != theirs:
        raise EnvironmentProblem(
            f"weights: the head there has the outputs {theirs}, but the loss {ours}",
            hint="name them alike, in the same order",
        )
    return found


class WithHead:
    """A model's form, for folders that hold a head: an output layer, which they lack, is read as zeros."""

    def __init__(self, form: HFForm, head: Head, architecture: str, shapes: Shapes) -> None:
        self._form, self._head, self._architecture, self._shapes = form, head, architecture, shapes
        self.loader, self.of_loss = head.loader, head.tensors.keys()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._form, name)

    def sources(self, name: str) -> list[str]:
        if name.startswith(OUTPUT):
            return []
        return [self._head.tensors[name]] if name in self.of_loss else self._form.sources(name)

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        if name.startswith(OUTPUT):
            return torch.zeros(self._shapes[name])
        return tensors[0] if name in self.of_loss else self._form.from_hf(name, tensors)

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if name.startswith(OUTPUT):
            return []
        if name in self.of_loss:
            return [(self._head.tensors[name], tensor)]
        drop = "" if self.of_loss else self._form.prefix  # the base model alone has none
        return [(hf_name.removeprefix(drop), value) for hf_name, value in self._form.to_hf(name, tensor)]

    def config_json(self) -> dict[str, Any]:
        return {**self._form.config_json(), **self._head.config, "architectures": [self._architecture]}

    def readout(self, tensors: Any) -> nn.Module:
        return Readout([tensors.read(name).float() for name in self.of_loss])


class Readout(nn.Module):
    """A head by itself: its numbers for the last token of each row, [B, N], or all hidden states."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self._weights = weights

    def forward(self, hidden: Tensor, *rest: Any) -> Tensor:
        for weight in self._weights:
            return nn.functional.linear(hidden[:, -1], weight)
        return hidden


def _class(table: str, config_json: Mapping[str, Any]) -> str:
    """Return the class that transformers has for a model in one of its tables.

    Raises:
        UsageError: it has none.
    """
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, table).get(config_json["model_type"])
    if found is None:
        raise UsageError(
            f"transformers has no class of this kind for the model_type {config_json['model_type']!r}",
            hint="titan itself can use the checkpoint",
        )
    return found if isinstance(found, str) else found[0]
