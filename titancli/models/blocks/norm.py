"""Norms, built from their specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from titancli.distributed.local import local
from titancli.models.blocks.init import zeros_

if TYPE_CHECKING:
    from titancli.protocols.shape import Norm


def norm_of(spec: Norm, width: int) -> nn.Module:
    """Return a norm over `width` features."""
    if spec.kind == "layer":
        return LayerNorm(width, spec.eps, bias=spec.bias)
    return (ZeroCentredRMSNorm if spec.zero_centred else nn.RMSNorm)(width, eps=spec.eps)


class ZeroCentredRMSNorm(nn.RMSNorm):
    """RMSNorm with the factor 1 + weight, so that weight decay draws it towards 1; computed in fp32 or
    more."""

    takes_local_parameters = True

    def __init__(self, dim: int, eps: float, **options: Any) -> None:
        super().__init__(dim, eps=eps, **options)

    def init_own(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Initialize to a factor of 1."""
        zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., dim], in the same dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), self.normalized_shape, 1 + local(self.weight).to(wide), self.eps).to(
            x.dtype
        )


class LayerNorm(nn.LayerNorm):
    """LayerNorm whose parameters may be DTensors, as under tensor parallelism."""

    takes_local_parameters = True

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., dim], in the same dtype."""
        bias = None if self.bias is None else local(self.bias)
        return layer_norm(x, self.normalized_shape, local(self.weight), bias, self.eps)
