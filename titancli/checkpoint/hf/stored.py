"""Reading stored tensors of a Hugging Face folder: unchanged, or quantized ones as bf16.

Block fp8 (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3): `X` in e4m3 and `X_scale_inv`, a
scale for each block of 128 × 128. MXFP4 (OCP Microscaling Formats 1.0): `X_blocks`, 16 bytes of two e2m1
values each, and `X_scales`, an e8m0 exponent for each 32 values, [out, in] where X is [in, out]. Packed int4
(compressed-tensors): `X_packed`, eight values an int32, and `X_scale`, one for each group of a row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titancli.checkpoint.format.files import read_runs
from titancli.checkpoint.format.region import Region, runs
from titancli.checkpoint.format.tensorfile import ITEM_SIZE, Entry
from titancli.checkpoint.format.tensors import TORCH_DTYPE, read_tensor
from titancli.checkpoint.hf.lazy_tensor import Virtual, everything, put
from titancli.errors import EnvironmentProblem
from titancli.models.quantization import Quantization

GAP = 256
"""Bytes between two wanted ones that are read along with them: another call would cost more."""
WIDENED = 1 << 24
"""Maximum total bytes of a read that includes unwanted ones."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of four-bit codes without their sign, which is the highest bit."""
_SIGNED = torch.tensor([*E2M1, *(-value for value in E2M1)])
# Looking up two values as one complex number is ten times as fast.
_PAIRS = torch.view_as_complex(torch.stack((_SIGNED.repeat(16), _SIGNED.repeat_interleave(16)), -1))
"""The two values of each byte."""


class Place(ABC):
    """A stored tensor, unread: the values of any region can be read separately."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """Return the file format's name of its dtype; for a quantized tensor, of the dequantized values."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def where(self) -> tuple[str, int]:
        """Return the file, and the offset of the values in it."""

    @abstractmethod
    def read(self, region: Region) -> Tensor:
        """Return the values of a region, on the CPU, reading next to nothing else.

        Raises:
            EnvironmentProblem: the file cannot be read, or its values are invalid; names it.
        """

    def virtual(self) -> Virtual:
        """Return the tensor, unread."""
        return Virtual.of(self.shape, TORCH_DTYPE[self.dtype], self.read)

    def whole(self) -> Tensor:
        """Return the tensor, on the CPU; memory holds one block besides it."""
        made = torch.empty(self.shape, dtype=TORCH_DTYPE[self.dtype])
        put(made, self.virtual())
        return made


@dataclass(frozen=True)
class Stored(Place):
    """A tensor of a file, stored without quantization."""

    path: Path
    entry: Entry

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def where(self) -> tuple[str, int]:
        return self.path.name, self.entry.start

    def whole(self) -> Tensor:
        """Return the tensor, mapped and not yet read."""
        return read_tensor(self.path, self.entry)

    def read(self, region: Region) -> Tensor:
        wider = self._widened(region)
        memory = np.empty(math.prod(map(len, wider)) * ITEM_SIZE[self.dtype], dtype=np.uint8)
        starts, run = runs(wider, self.shape, ITEM_SIZE[self.dtype])
        view = memory.data
        read_runs(
            self.path,
            [
                (self.entry.start + start, view[i * run : (i + 1) * run])
                for i, start in enumerate(starts.tolist())
            ],
        )
        values = torch.from_numpy(memory).view(TORCH_DTYPE[self.dtype]).view([len(r) for r in wider])
        return values[
            tuple(
                slice((r.start - w.start) // w.step, (r[-1] - w.start) // w.step + 1, r.step // w.step)
                for r, w in zip(region, wider, strict=True)
            )
        ]

    def bytes_read(self, region: Region) -> int:
        """Return how many bytes of the file `read` reads."""
        return math.prod(map(len, self._widened(region))) * ITEM_SIZE[self.dtype]

    def _widened(self, region: Region) -> Region:
        """Return the region with the small gaps between wanted values that are not worth skipping."""
        wider, inner = list(region), ITEM_SIZE[self.dtype]
        most = max(WIDENED, 4 * math.prod(map(len, region)) * inner)
        for dim in reversed(range(len(region))):
            r, size = region[dim], self.shape[dim]
            within = range(r[0], r[-1] + 1)
            options = [(within, r.step - 1)]
            if any(len(outer) > 1 for outer in region[:dim]):
                options.append((range(size), size - len(within)))
            for option, left in options:
                bigger = [*wider[:dim], option, *wider[dim + 1 :]]
                if left * inner > GAP or math.prod(map(len, bigger)) * ITEM_SIZE[self.dtype] > most:
                    return tuple(wider)
                wider = bigger
            if len(wider[dim]) < size:
                break
            inner *= size
        return tuple(wider)


# ------------------------------------------------------------------------------------ quantized, as bf16


@dataclass(frozen=True)
class Quantised(Place):
    """A tensor that is read as bf16 from the quantized tensors that a folder stores for it."""

    values: Stored
    scales: Stored

    dtype = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def where(self) -> tuple[str, int]:
        return self.values.where

    def fault(self) -> str | None:
        """Return what is wrong with shapes and dtypes."""
        raise NotImplementedError

    def _scales(self, region: Region) -> Tensor:
        """Return the scales in float32.

        Raises:
            EnvironmentProblem: one of them is not a number.
        """
        found = self.scales.read(region)
        if found.dtype == torch.uint8:
            found = found.view(torch.float8_e8m0fnu)
        found = found.float()
        if not bool(found.isfinite().all()):
            raise EnvironmentProblem(
                f"{self.scales.path}: {self.scales.entry.key} holds a scale that is NaN or infinite",
                hint="download the file again",
            )
        return found

    def _misfit(self, wanted: str) -> str:
        return (
            f"{self.scales.entry.key} is {self.scales.dtype} {list(self.scales.shape)}, but "
            f"{self.values.entry.key}, {self.values.dtype} {list(self.values.shape)}, needs {wanted}"
        )


@dataclass(frozen=True)
class BlockFP8(Quantised):
    """e4m3 values, and a scale for each block."""

    block: tuple[int, int] | None

    def read(self, region: Region) -> Tensor:
        made = self.values.read(region).float()
        if self.block is None:
            return made.mul_(self._scales(everything(self.scales.shape)).view(())).bfloat16()
        *outer, rows, columns = region
        inner = [
            range(r[0] // size, r[-1] // size + 1)
            for r, size in zip((rows, columns), self.block, strict=True)
        ]
        scales = self._scales((*outer, *inner))
        for dim, r, size, there in zip((-2, -1), (rows, columns), self.block, inner, strict=True):
            scales = scales.index_select(dim, torch.arange(r.start, r.stop, r.step) // size - there.start)
        return made.mul_(scales).bfloat16()

    def fault(self) -> str | None:
        wanted: list[tuple[int, ...]] = [(), (1,)]
        if self.block is not None:
            if len(self.shape) < 2:
                return f"{self.values.entry.key} is {list(self.shape)}, and has no blocks"
            wanted = [
                (*self.shape[:-2], *(-(-n // b) for n, b in zip(self.shape[-2:], self.block, strict=True)))
            ]
        if self.scales.shape not in wanted or self.scales.dtype not in (
            "F32",
            "BF16",
            "F16",
            "F8_E8M0",
            "U8",
        ):
            return self._misfit(f"scales of the shape {list(wanted[-1])}")
        return None


@dataclass(frozen=True)
class MXFP4(Quantised):
    """Four bits per value, the lower ones first, and an exponent for each 32 values of a row."""

    def virtual(self) -> Virtual:
        made: Any = Virtual.of(self._rows, torch.bfloat16, self._transposed).transpose(-2, -1)
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, rows, columns = self._rows
        return (*outer, columns, rows)

    @property
    def _rows(self) -> tuple[int, ...]:
        *outer, groups, size = self.values.shape
        return (*outer, groups * size * 2)

    def read(self, region: Region) -> Tensor:
        *outer, rows, columns = region
        return self._transposed((*outer, columns, rows)).transpose(-2, -1)

    def _transposed(self, region: Region) -> Tensor:
        """Return a region of [out, in], as it is stored."""
        *outer, columns = region
        groups = range(columns[0] // 32, columns[-1] // 32 + 1)
        packed = self.values.read((*outer, groups, range(16)))
        pairs = torch.view_as_real(_PAIRS.index_select(0, packed.flatten().int()))
        made = pairs.view(*packed.shape[:-1], 32).mul_(self._scales((*outer, groups))[..., None])
        made = made.bfloat16().flatten(-2)
        start = columns.start - 32 * groups.start
        return made[..., start : start + columns[-1] - columns[0] + 1 : columns.step]

    def fault(self) -> str | None:
        values = self.values
        if values.dtype != "U8" or len(values.shape) < 3 or values.shape[-1] != 16:
            return f"{values.entry.key} is {values.dtype} {list(values.shape)}, not U8 [..., 16]"
        if self.scales.shape != values.shape[:-1] or self.scales.dtype not in ("U8", "F8_E8M0"):
            return self._misfit(f"U8 scales of the shape {list(values.shape[:-1])}")
        return None


@dataclass(frozen=True)
class PackedInt4(Quantised):
    """Four-bit values from -8 to 7, the first in the lowest bits, and a scale for each group of a row."""

    shape_tensor: Stored
    """The stored tensor that contains the shape of the whole one."""
    groups: frozenset[int | None]
    """Permitted numbers of values of a row that share a scale; None: all of a row."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.values.shape[0], 8 * self.values.shape[1])

    @cached_property
    def _checked(self) -> bool:
        stored = self.shape_tensor
        if tuple(says := stored.whole().tolist()) != self.shape:
            raise EnvironmentProblem(
                f"{stored.path}: {stored.entry.key} says {says}, but "
                f"{self.values.entry.key} holds {list(self.shape)}"
            )
        return True

    def read(self, region: Region) -> Tensor:
        rows, columns = region
        words = range(columns[0] // 8, columns[-1] // 8 + 1)
        size = self.shape[1] // self.scales.shape[1]
        groups = range(columns[0] // size, columns[-1] // size + 1)
        packed = self.values.read((rows, words)) if self._checked else torch.empty(0)
        made = (packed[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)).bitwise_and_(15).flatten(1)
        start = columns.start - 8 * words.start
        made = made[:, start : start + columns[-1] - columns[0] + 1 : columns.step]
        which = torch.arange(columns.start, columns.stop, columns.step) // size - groups.start
        product = (made - 8).float().mul_(self._scales((rows, groups)).index_select(1, which))
        return product.to(TORCH_DTYPE[self.scales.dtype]).bfloat16()

    def fault(self) -> str | None:
        values, scales = self.values, self.scales
        if values.dtype != "I32" or len(values.shape) != 2:
            return f"{values.entry.key} is {values.dtype} {list(values.shape)}, not I32 [rows, columns / 8]"
        alike = len(scales.shape) == 2 and scales.shape[0] == self.shape[0] and scales.shape[1]
        size = self.shape[1] // scales.shape[1] if alike and not self.shape[1] % scales.shape[1] else 0
        wanted = {min(group or self.shape[1], self.shape[1]) for group in self.groups}
        if size not in wanted or scales.dtype not in ("F32", "BF16", "F16"):
            of = " or ".join(map(str, sorted(wanted)))
            return self._misfit(f"scales of the shape [{self.shape[0]}, groups], one for each {of} values")
        stored = self.shape_tensor
        if stored.shape != (2,) or stored.dtype not in ("I64", "I32"):
            return f"{stored.entry.key} is {stored.dtype} {list(stored.shape)}, not I64 [2]"
        return None


# ----------------------------------------------------------- the stored tensors of each quantized tensor


@dataclass(frozen=True)
class _Scheme:
    """A quantization format: the suffixes of the tensors that are stored for a quantized one."""

    values: str
    scales: str
    make: Callable[..., Quantised]
    more: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """Suffixes of tensors that are not used here: the scales of activations."""


def _scheme(how: Quantization) -> _Scheme:
    if how.method == "fp8":
        unused = ("activation_scale", "input_scale")
        return _Scheme("", "_scale_inv", partial(BlockFP8, block=how.block), unused=unused)
    if how.method == "mxfp4":
        return _Scheme("_blocks", "_scales", MXFP4)
    return _Scheme("_packed", "_scale", partial(PackedInt4, groups=how.groups), ("_shape",))


def as_bf16(places: dict[str, Stored], how: Quantization) -> dict[str, Place]:
    """Return a folder's tensors with the quantized ones as bf16.

    Args:
        places: all tensors of the folder, by name.

    Raises:
        EnvironmentProblem: scales are missing, left over, or of another shape; names file and tensor.
    """
    scheme = _scheme(how)
    made: dict[str, Place] = {**places}
    names = [name.removesuffix(scheme.scales) for name in places if name.endswith(scheme.scales)]
    names += [
        name.removesuffix(scheme.values) for name, place in places.items() if _quantised(name, place, scheme)
    ]
    for name in dict.fromkeys(names):
        parts = [name + end for end in (scheme.values, scheme.scales, *scheme.more)]
        there = [part for part in parts if part in places]
        if there != parts or not _quantised(parts[0], places[parts[0]], scheme):
            lacking = next((part for part in parts if part not in there), parts[0])
            have = places[there[-1]]
            raise EnvironmentProblem(
                f"{have.path}: {have.entry.key} ({have.dtype}) has no {lacking}"
                + (f" that is quantized: it is {places[lacking].dtype}" if lacking in there else ""),
                hint="download the folder again",
            )
        one = scheme.make(*(places[part] for part in parts))
        if fault := one.fault():
            raise EnvironmentProblem(f"{one.values.path}: {fault}", hint="download the folder again")
        for part in parts:
            del made[part]
        made[name] = one
    return {name: place for name, place in made.items() if not name.endswith(scheme.unused or ("\0",))}


def _quantised(name: str, place: Stored, scheme: _Scheme) -> bool:
    return name.endswith(scheme.values) if scheme.values else place.dtype == "F8_E4M3"
