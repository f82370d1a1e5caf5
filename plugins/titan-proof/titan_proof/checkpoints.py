"""Compare two checkpoints, tensor by tensor, on whatever layouts they were written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from titancli.checkpoint import CheckpointReader, read_manifest


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two checkpoints."""

    name: str
    relative: float
    """‖Δ‖ / ‖first‖; infinite if only one checkpoint has the tensor, the shapes or dtypes differ, or it is
    not finite."""
    elements: int
    """The number of values that differ."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of all tensors of two checkpoints."""

    count: int
    """The number of tensors of both together."""
    unequal: list[TensorDifference]
    """The tensors that are not bitwise equal, in the order of the first checkpoint."""


def compare_checkpoints(one: Path, other: Path) -> Comparison:
    """Compare the tensors of two checkpoints: weights and the optimizer's state.

    Files with equal checksums are not read.

    Raises:
        EnvironmentProblem: a folder is not a checkpoint, or is damaged.
    """
    sides = CheckpointReader(one, verify="size"), CheckpointReader(other, verify="size")
    names = list(dict.fromkeys(name for side in sides for name in side.names()))
    if _files(one) == _files(other):
        return Comparison(len(names), [])
    first, second = (set(side.names()) for side in sides)
    found = []
    for name in names:
        if name not in first or name not in second:
            found.append(TensorDifference(name, math.inf, 0))
        elif (difference := _difference(name, sides[0].read(name), sides[1].read(name))) is not None:
            found.append(difference)
    return Comparison(len(names), found)


def _files(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the checksums of the files that hold tensors, and of the file that says where each tensor is."""
    files = read_manifest(folder).files
    return {
        name: (row.xxh3_64,)
        for name, row in files.items()
        if name.endswith(".safetensors") or name == "metadata.json"
    }


def _difference(name: str, one: Tensor, other: Tensor) -> TensorDifference | None:
    if one.shape != other.shape or one.dtype != other.dtype:
        return TensorDifference(name, math.inf, one.numel())
    same = torch.eq(_bits(one), _bits(other))
    if bool(same.all()):
        return None
    a, b = (tensor.double() if not tensor.is_complex() else tensor for tensor in (one, other))
    relative = float((a - b).norm() / a.norm())  # infinite where the first is all zero
    return TensorDifference(name, relative if math.isfinite(relative) else math.inf, int((~same).sum()))


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers, so that NaN equals itself."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])
