"""A Hugging Face form that reads a folder with a smaller vocabulary than the model's: `weights_vocab`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titancli.checkpoint.format.region import Region
from titancli.checkpoint.hf.config_match import vocabulary_in
from titancli.checkpoint.hf.lazy_tensor import Virtual
from titancli.protocols import HFForm
from titancli.registry.component import build

ROWS = 4096
"""Rows of a weight that are summed up at a time."""


class Grown:
    """A form whose weights over the vocabulary get further rows, each the mean of those that a folder has.

    The plain mean, as `resize_token_embeddings` of transformers has it where it draws nothing; in fp32 for
    the same value on every layout, rounded to the dtype of the folder.
    """

    def __init__(self, form: HFForm, names: Collection[str], before: int, rows: int) -> None:
        """
        Args:
            names: the parameters that have a row for each id.
            before: number of rows in the folder.
            rows: number of rows in the model.
        """
        self._form, self.names, self.before, self.rows = form, names, before, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._form, name)

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Build a parameter, see `titancli.protocols.HFForm`; of another number of rows it stays as it is."""
        made = self._form.from_hf(name, tensors)
        if name not in self.names or len(made) != self.before:
            return made
        shape = (self.rows - self.before, *made.shape[1:])
        if made.is_meta:
            return torch.cat((made, made.new_empty(shape)))
        new = _repeated(made, shape)
        return torch.cat((made, new if isinstance(made, Virtual) else new.whole()))


def _repeated(table: Tensor, shape: Sequence[int]) -> Virtual:
    """Return rows that are the mean of a table's; only who reads one of them reads the table."""

    @cache
    def mean() -> Tensor:
        total = torch.zeros(table.shape[1:], dtype=torch.float64)
        for start in range(0, len(table), ROWS):
            total += table[start : start + ROWS].double().sum(0)
        return (total / len(table)).float().to(table.dtype)

    def read(region: Region) -> Tensor:
        rows, *columns = region
        values = mean()[tuple(slice(r.start, r.stop, r.step) for r in columns)]
        return values.expand(len(rows), *values.shape)

    return Virtual.of(shape, table.dtype, read)


def grown_form(form: HFForm, model: Any, folder: Path) -> HFForm:
    """Return the form that reads a folder for a model whose vocabulary may be larger than the folder's."""
    before, rows = vocabulary_in(folder, model), model.vocab_size
    if before is None or rows is None or before >= rows:
        return form
    with torch.device("meta"):
        built = build(model, seq_len=1)
    names = [
        name
        for name, parameter in built.named_parameters()
        if len(parameter) == rows
        and next((s for p, s in built.tensor_plan.items() if fnmatchcase(name, p)), None) == "vocab"
    ]
    made: Any = Grown(form, names, before, rows)
    return made
