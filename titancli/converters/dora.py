"""Magnitudes of DoRA (arXiv 2402.09353): trained norms of the rows of a weight with its adapter.

They are stored and computed with in fp32: in bf16 each row would change by up to 0.4 %, and an untouched
adapter would not be its base.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm

from titancli.distributed.collectives import Group, all_reduce
from titancli.distributed.local import local

MAGNITUDE = "lora_magnitude"


class Magnitudes(nn.Module):
    """A layer whose weight, [out, in], may have magnitudes."""

    weight: Tensor
    lora_magnitude: Any
    """The norms of the rows, if they are trained, or None."""
    lora_scale: float
    _columns: Group | None = None
    """The ranks that have the other columns of the weight."""
    _rows: Group | None = None
    """The ranks that have the other rows of it."""
    _magnitudes: Tensor | None = None
    """Under FSDP2, which gathers in the dtype of computation: the magnitudes of this rank's rows, in fp32."""

    def base_weight(self) -> Tensor:
        """Return this rank's part of the frozen weight, [out, in], as values to compute with."""
        return local(self.weight)

    def ratio(self, a: Tensor, b: Tensor) -> Tensor:
        """Return magnitudes / norms of the rows of W + scale·B·A, [out] fp32, the norms constant (paper,
        4.3)."""
        with torch.no_grad():
            product = self.lora_scale * (b @ a)
            norms = vector_norm(self.base_weight() + product, dim=1, dtype=torch.float32)
            if self._columns is not None:
                norms = all_reduce(norms.square(), "sum", self._columns).sqrt()
        return self._own_magnitudes() / norms

    def _own_magnitudes(self) -> Tensor:
        """Return the magnitudes of this rank's rows, in fp32."""
        own: Any = self._parameters[MAGNITUDE]  # not the attribute, which may be cast
        own = local(own)
        if own.dtype == torch.float32 or self._magnitudes is None:
            found: Tensor = own.float()
            return found
        return self._magnitudes + (own - own.detach()).float()  # the value of one, the gradient of the other

    def renew_magnitudes(self) -> None:
        """Keep the magnitudes in fp32, see `_magnitudes`. Collective."""
        whole = self.lora_magnitude.detach()
        whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).float()
        if self._rows is not None:
            whole = whole.chunk(self._rows.size)[self._rows.rank]
        if self._magnitudes is None:
            self._magnitudes = whole.clone()
        else:
            self._magnitudes.copy_(whole)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the magnitudes in fp32, whatever the dtype of the model."""
        super()._apply(fn, recurse)
        if self.lora_magnitude is not None:
            self.lora_magnitude.data = self.lora_magnitude.data.float()
        return self
