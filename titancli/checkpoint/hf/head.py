"""The Hugging Face form of a model with a loss's head in place of its output layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titancli.checkpoint.hf.likeness import CONFIG, read_config
from titancli.errors import EnvironmentProblem
from titancli.protocols import HFForm, HFHead

if TYPE_CHECKING:
    from titancli.checkpoint.format.tensors import Tensors

OUTPUT = "output."
"""Prefix of the parameters that a head replaces."""


class WithHead:
    """A model's form, for folders that hold a head: an output layer that they lack is read as zeros."""

    def __init__(self, form: HFForm, head: HFHead, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes`: of the model's parameters."""
        self._form, self.head, self._shapes = form, head, shapes
        self.loader = head.loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._form, name)

    def sources(self, name: str) -> list[str]:
        if name.startswith(OUTPUT):
            return []
        return [self.head.tensors[name]] if name in self.head.tensors else self._form.sources(name)

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        if name.startswith(OUTPUT):
            return torch.zeros(self._shapes[name])
        return tensors[0] if name in self.head.tensors else self._form.from_hf(name, tensors)

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if name.startswith(OUTPUT):
            return []
        if name in self.head.tensors:
            return [(self.head.tensors[name], tensor)]
        drop = "" if self.head.tensors else self._form.prefix
        return [(hf_name.removeprefix(drop), value) for hf_name, value in self._form.to_hf(name, tensor)]

    def config_json(self) -> dict[str, Any]:
        return {**self._form.config_json(), **self.head.config, "architectures": [self.head.architecture]}


class Readout(nn.Module):
    """What stands in place of a model's `output` to compare it with a folder: the head's numbers for the last
    token of each row, [B, N], or all hidden states."""

    def __init__(self, head: HFHead, reader: Tensors) -> None:
        super().__init__()
        self._weights = [reader.read(name).float() for name in head.tensors]

    def forward(self, hidden: Tensor, *rest: Any) -> Tensor:
        for weight in self._weights:
            return nn.functional.linear(hidden[:, -1], weight)
        return hidden


def with_head(form: HFForm, loss: Any, shapes: Mapping[str, tuple[int, ...]]) -> HFForm:
    """Return the form of folders of a model that was trained with a loss.

    Args:
        loss: the loss's config; None: it is not known.
        shapes: of the model's parameters.
    """
    head: HFHead | None = None if loss is None else loss.hf_head(form.config_json())
    if head is None:
        return form
    found: Any = WithHead(form, head, shapes)
    return found


def form_in(folder: Path, form: HFForm, loss: Any, shapes: Mapping[str, tuple[int, ...]]) -> HFForm:
    """Return the form of a folder that a run with a loss starts from: with the loss's head if it is there.

    Raises:
        EnvironmentProblem: the folder's head has other outputs, by their names.
    """
    keys = read_config(folder / CONFIG)
    if keys.get("architectures") in (None, form.config_json().get("architectures")):
        return form
    found = with_head(form, loss, shapes)
    if not isinstance(found, WithHead) or keys["architectures"] != [found.head.architecture]:
        return form
    ours, theirs = ([*(one.get("id2label") or {}).values()] for one in (found.head.config, keys))
    named = len(theirs) > 1 and not all(str(name).startswith("LABEL_") for name in theirs)
    if named and ours != theirs:
        raise EnvironmentProblem(
            f"weights: the head in {folder} has the outputs {theirs}, but the loss {ours}",
            hint="name them alike, in the same order",
        )
    return found


def head_tensors(form: HFForm) -> Mapping[str, str]:
    """Return the parameters of the loss that folders of a form have, with their names there."""
    return form.head.tensors if isinstance(form, WithHead) else {}
