"""`Batch`: a frozen mapping of names to tensors whose first dimension is always rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from titancli.errors import TitanError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORE = -100
"""A target that is none."""


class Batch(Mapping[str, "Tensor"]):
    """Rows of training data.

    | key | shape, dtype | meaning |
    |---|---|---|
    | tokens | [B, S] int64 | model input |
    | targets | [B, S] int64 | already shifted: `targets[b, t]` follows `tokens[b, t]`; -100 is no target |
    | positions | [B, S] int64 | position within the document |
    | document_ids | [B, S] int32, optional | attention stays inside one id |
    | any other | [B, …] | a loss's own inputs |

    `unit` rows belong together (2 for preference pairs) and are never split.
    """

    __slots__ = ("_tensors", "unit")

    def __init__(self, tensors: Mapping[str, Tensor], *, unit: int = 1) -> None:
        rows = {name: tensor.shape[0] for name, tensor in tensors.items()}
        if len(set(rows.values())) != 1:
            raise TitanError(f"a batch's tensors must have the same number of rows, not {rows}")
        if next(iter(rows.values())) % unit:
            raise TitanError(f"a batch of {next(iter(rows.values()))} rows cannot hold units of {unit}")
        self._tensors = dict(tensors)
        self.unit = unit

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def rows(self) -> int:
        return next(iter(self._tensors.values())).shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device; the copy does not wait for it."""
        return Batch({k: v.to(device, non_blocking=True) for k, v in self.items()}, unit=self.unit)

    def split(self, rows: int) -> list[Batch]:
        """Pieces of `rows` rows each, a multiple of `unit`."""
        if rows % self.unit or self.rows % rows:
            raise TitanError(f"a batch of {self.rows} rows (units of {self.unit}) cannot be split by {rows}")
        pieces = {name: tensor.split(rows) for name, tensor in self.items()}
        return [
            Batch({name: parts[i] for name, parts in pieces.items()}, unit=self.unit)
            for i in range(self.rows // rows)
        ]

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{k}{list(v.shape)}' for k, v in self.items())})"
