"""How operands of low-precision products are cast, and how tensor parallelism cuts them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from titan_float8 import formats
from titan_float8.formats import Codes
from titancli.distributed.collectives import Group

Role = Literal["input", "weight", "grad"]


class Scheme(NamedTuple):
    """How a layer's operands are cast, and multiplied. Plain values, so that compiled code may hold it."""

    format: Literal["rowwise", "blockwise", "mxfp8", "nvfp4"]
    kernel: Literal["emulated", "hopper", "torchao", "planned"] = "emulated"
    """Who multiplies: torch, dequantized operands in the usual dtype; torch's float8 kernel for groups;
    torchao; or nobody, for a plan of memory and time."""
    floor: bool = False
    """MXFP8: see `formats.mxfp8`."""
    plain_grad_weight: bool = False
    """Whether `grad.T @ x` is a product in the usual dtype."""
    stochastic: bool = False
    """NVFP4: whether gradients are rounded stochastically."""
    hadamard: bool = False
    """NVFP4: whether both operands of `grad.T @ x` are turned before they are cast, see `formats.turned`."""

    @property
    def block(self) -> int:
        """Return the numbers that share a scale; both sides of a matrix must be multiples of it."""
        return {"rowwise": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 16}[self.format]

    def cast(
        self,
        x: Tensor,
        role: Role,
        largest: Tensor | None = None,
        group: Tensor | None = None,
        groups: int = 0,
        cut: Cut | None = None,
        cut_dim: int = -1,
    ) -> Codes:
        """Cast along the last dimension.

        Args:
            x: […, rows, K].
            largest: NVFP4: see `formats.nvfp4`.
            group: float8 rowwise: the group of each column, of `groups`; None: a row has one scale.
            cut: how operands are shards; a gradient's along `cut_dim`.
        """
        if self.format == "rowwise":
            return formats.rowwise(x, group, groups, self.block)
        if self.format == "blockwise":
            return formats.blockwise(x, self.block if role == "weight" else 1)
        if self.format == "mxfp8":
            return formats.mxfp8(x, floor=self.floor)
        assert largest is not None
        noise = _noise(x, cut, cut_dim) if self.stochastic and role == "grad" else None
        return formats.nvfp4(x, largest, rows=self.block if role == "weight" else 1, noise=noise)


class Cut(NamedTuple):
    """Which operands are shards under tensor parallelism, so that their largest number is the group's."""

    name: str
    size: int
    rank: int
    input: bool
    weight: bool
    grad: bool

    @classmethod
    def of(cls, group: Group, style: str) -> Cut:
        return cls(group.name, group.size, group.rank, style == "row", True, style == "column")


def _noise(x: Tensor, cut: Cut | None, dim: int) -> Tensor:
    """Return the part for x of the random numbers of a whole gradient, which all ranks draw alike."""
    if cut is None or not cut.grad:
        return torch.rand_like(x, dtype=torch.float32)
    shape = list(x.shape)
    shape[dim] *= cut.size
    return torch.rand(shape, device=x.device).chunk(cut.size, dim)[cut.rank]
