"""Converting torch tensors from and to the bytes of `titancli.checkpoint.format.tensorfile`."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from titancli.checkpoint.format.tensorfile import Entry
from titancli.errors import EnvironmentProblem, TitanError

TORCH_DTYPE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}


class Tensors(Protocol):
    """Named whole tensors that are read one at a time."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> Tensor:
        """Return the tensor, on the CPU."""
        ...


class MemoryTensors:
    """`Tensors` that are already in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach().cpu()


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the file format's name of a dtype.

    Raises:
        TitanError: it has none; `name` is the tensor's name in the message.
    """
    if dtype not in DTYPE_NAME:
        raise TitanError(
            f"{name} is {str(dtype).removeprefix('torch.')}, which a safetensors file cannot hold"
        )
    return DTYPE_NAME[dtype]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's values as row-major bytes; copied only if it is on a device or not contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read_tensor(path: Path, entry: Entry) -> Tensor:
    """Return one tensor of a file, mapped: its pages are read on first access and can be dropped.

    Raises:
        EnvironmentProblem: the file cannot be opened.
    """
    dtype = TORCH_DTYPE[entry.dtype]
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    try:
        with open(path, "rb") as file:
            # A private mapping: torch wants writable memory, and nothing is ever written back.
            base = entry.start - entry.start % mmap.ALLOCATIONGRANULARITY
            length = entry.start + entry.nbytes - base
            memory = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=base)
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error}") from error
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=entry.nbytes, offset=entry.start - base)
    if entry.start % dtype.itemsize:  # files of other programs may be unaligned
        raw = raw.clone()
    return raw.view(dtype).view(entry.shape)
