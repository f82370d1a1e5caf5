"""Lazy tensors: only the values that a shard needs are read, whatever a form makes of them.

A form's transforms are written for whole tensors. Given virtual ones, an operation that only moves values (a
transposition, a stack of experts, another order of rows) reads nothing: its result is virtual too, and knows
which regions of its operands a region of it needs. Any other operation reads its operands whole, and none can
write to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from titancli.checkpoint.format.reader import parts_of
from titancli.checkpoint.format.region import Region

Read = Callable[[Region], Tensor]
"""Function that returns the values of a region, as a tensor in memory of the region's shape."""

BLOCK = 1 << 22
"""Bytes of values that are read at a time."""

aten = torch.ops.aten


class Virtual(Tensor):
    """A CPU tensor without memory. `read` returns the values of a region, `whole` all of them."""

    like: Tensor
    """A meta tensor with its shape, strides and dtype."""
    read: Read
    order: tuple[int, ...]
    """The nesting level of each dimension in the file: along the largest, neighbours lie side by side."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, read: Read, order: Sequence[int]) -> Virtual:
        made: Any = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )

        def guarded(region: Region) -> Tensor:
            if all(map(len, region)):
                return read(region)
            return torch.empty([len(r) for r in region], dtype=like.dtype)

        made.like, made.read, made.order = like, guarded, tuple(order)
        return made

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, read: Read) -> Virtual:
        """Return a tensor that is stored in row-major order."""
        return Virtual(torch.empty(tuple(shape), dtype=dtype, device="meta"), read, range(len(shape)))

    def whole(self) -> Tensor:
        """Return all values."""
        return self.read(everything(self.shape))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (move := _MOVES.get(func)) is not None and (made := move(*args, **kwargs)) is not None:
            like = func(*_likes(args), **{key: value for key, value in kwargs.items() if key != "device"})
            if isinstance(made, list):
                return [Virtual(meta, *one) for meta, one in zip(like, made, strict=True)]
            return Virtual(like, *made)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, Virtual):
                raise RuntimeError(f"{func} writes to a tensor that is not in memory")
        args, kwargs = tree_map_only(Virtual, Virtual.whole, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Virtual({list(self.shape)}, {self.dtype})"


def everything(shape: Sequence[int]) -> Region:
    """Return the region that covers the whole tensor."""
    return tuple(range(size) for size in shape)


def blocks(tensor: Virtual, region: Region, limit: int = BLOCK) -> Iterator[Region]:
    """Divide a region into ones of at most `limit` bytes, or one element, that are as contiguous in the file
    as possible."""
    size = math.prod(map(len, region)) * tensor.dtype.itemsize
    several = [dim for dim, chosen in enumerate(region) if len(chosen) > 1]
    if size <= limit or not several:
        yield region
        return
    dim = min(several, key=lambda dim: tensor.order[dim])
    rows = max(1, limit * len(region[dim]) // size)
    for start in range(0, len(region[dim]), rows):
        yield from blocks(
            tensor, (*region[:dim], region[dim][start : start + rows], *region[dim + 1 :]), limit
        )


@torch.no_grad()
def put(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter, or this rank's part of it into a sharded one. Of a virtual tensor
    only that part is read, a block at a time."""
    for _, (offsets, sizes), target in parts_of({"a parameter": parameter}):
        region = tuple(range(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if not isinstance(whole, Virtual):
            target.copy_(whole[tuple(slice(r.start, r.stop) for r in region)])
            continue
        for block in blocks(whole, region):
            inside = tuple(slice(r.start - o, r.stop - o) for r, o in zip(block, offsets, strict=True))
            target[inside].copy_(whole.read(block))


def _likes(values: Any) -> Any:
    """Return the values with meta tensors instead of the operands."""
    return tree_map_only(Tensor, lambda x: x.like if isinstance(x, Virtual) else x.to("meta"), values)


# -------------------------------------------------------------------------- operations that only move values

Moved = tuple[Read, Sequence[int]]
"""The `read` of a result, and its order."""


def _virtual(tensor: Tensor) -> Virtual:
    """Return a tensor as a virtual one, also if it is in memory."""
    if isinstance(tensor, Virtual):
        return tensor
    return Virtual.of(tensor.shape, tensor.dtype, lambda region: tensor[_slices(region)])


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(r.start, r.stop, r.step) for r in region)


def _same(x: Virtual, **more: Any) -> Moved | None:
    """Return a copy, which may have another dtype."""
    dtype = more.get("dtype") or x.dtype
    if torch.device(more.get("device") or "cpu").type != "cpu":
        return None
    return (lambda region: x.read(region).to(dtype)), x.order


def _permuted(x: Virtual, dims: Sequence[int]) -> Moved:
    dims = [dim % x.ndim for dim in dims]

    def read(region: Region) -> Tensor:
        return x.read(tuple(region[dims.index(dim)] for dim in range(x.ndim))).permute(dims)

    return read, [x.order[dim] for dim in dims]


def _transposed(x: Virtual, first: int, second: int) -> Moved:
    dims = list(range(x.ndim))
    dims[first], dims[second] = dims[second], dims[first]
    return _permuted(x, dims)


def _selected(x: Virtual, dim: int, index: int) -> Moved:
    dim, index = dim % x.ndim, index % x.shape[dim]

    def read(region: Region) -> Tensor:
        return x.read((*region[:dim], range(index, index + 1), *region[dim:])).select(dim, 0)

    return read, [*x.order[:dim], *x.order[dim + 1 :]]


def _sliced(
    x: Virtual, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Moved:
    dim = dim % x.ndim
    chosen = range(x.shape[dim])[start:end:step]

    def read(region: Region) -> Tensor:
        r = region[dim]
        return x.read((*region[:dim], chosen[r.start : r.stop : r.step], *region[dim + 1 :]))

    return read, x.order


def _split(x: Virtual, sizes: int | Sequence[int], dim: int = 0) -> list[Moved]:
    if isinstance(sizes, int):
        length = x.shape[dim]
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_sliced(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _unbound(x: Virtual, dim: int = 0) -> list[Moved]:
    return [_selected(x, dim, index) for index in range(x.shape[dim])]


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Moved:
    given = [_virtual(tensor) for tensor in tensors]
    dim = dim % (given[0].ndim + 1)

    def read(region: Region) -> Tensor:
        inner = (*region[:dim], *region[dim + 1 :])
        made = torch.empty([len(r) for r in region], dtype=given[0].dtype)
        for place, index in enumerate(region[dim]):
            made.select(dim, place).copy_(given[index].read(inner))
        return made

    outermost = min(given[0].order, default=0) - 1
    return read, [*given[0].order[:dim], outermost, *given[0].order[dim:]]


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Moved:
    given = [_virtual(tensor) for tensor in tensors]
    dim = dim % given[0].ndim

    def read(region: Region) -> Tensor:
        made, begin = [], 0
        for one in given:
            length = one.shape[dim]
            mine = [i - begin for i in region[dim] if begin <= i < begin + length]
            begin += length
            if mine:
                rows = range(mine[0], mine[-1] + 1, region[dim].step)
                made.append(one.read((*region[:dim], rows, *region[dim + 1 :])))
        return torch.cat(made, dim)

    return read, given[0].order


# -------------------------------------------------------------------------------------------------- reshaping


def _reshaped(x: Virtual, shape: Sequence[int]) -> Moved:
    groups = list(_groups(x.shape, shape))

    def read(region: Region) -> Tensor:
        wanted: list[range] = []
        for dims, made in groups:
            if pieces := _pieces(x.shape[dims], shape[made], region[made]):
                dim, ranges = made.start + pieces[0], pieces[1]
                return torch.cat([read((*region[:dim], r, *region[dim + 1 :])) for r in ranges], dim)
            wanted += _covering(x.shape[dims], shape[made], region[made])
        values = x.read(tuple(wanted))
        place = 0
        for dims, made in groups:
            values = _picked(values, place, wanted[dims], x.shape[dims], shape[made], region[made])
            place += made.stop - made.start
        return values

    order = [min(x.order[dims], default=0) for dims, made in groups for _ in range(made.start, made.stop)]
    return read, order


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield the smallest groups of dimensions of one shape that equal groups of the other."""
    i = j = 0
    while i < len(before) or j < len(after):
        i0, j0, one, other = i, j, 1, 1
        while True:
            if i < len(before) and (one < other or i == i0):
                one, i = one * before[i], i + 1
            elif j < len(after) and (other < one or j == j0):
                other, j = other * after[j], j + 1
            else:
                break
        yield slice(i0, i), slice(j0, j)


def _flat(shape: Sequence[int], region: Sequence[range]) -> range | None:
    """Return the row-major indices of a region's elements; None if they are not evenly spaced."""
    start, step, count, stride = 0, 1, 1, 1
    for size, r in zip(reversed(shape), reversed(region), strict=True):
        start += r.start * stride
        if len(r) > 1:
            if count == 1:
                step = r.step * stride
            elif r.step * stride != step * count:
                return None
            count *= len(r)
        stride *= size
    return range(start, start + (count - 1) * step + 1, step)


def _ends(shape: Sequence[int], region: Sequence[range]) -> tuple[int, int]:
    """Return the first and last row-major index of a region's elements."""
    low, high, stride = 0, 0, 1
    for size, r in zip(reversed(shape), reversed(region), strict=True):
        low, high, stride = low + r[0] * stride, high + r[-1] * stride, stride * size
    return low, high


def _pieces(
    before: Sequence[int], after: Sequence[int], region: Sequence[range]
) -> tuple[int, list[range]] | None:
    """Return the dimension, and its parts, by which a region of one shape of a group is divided so that each
    part is a region of the other; None: it already is one."""
    numbers = _flat(after, region)
    if numbers is None:
        dim = next(dim for dim, r in enumerate(region) if len(r) > 1)
        return dim, [range(i, i + 1) for i in region[dim]]
    if len(after) != 1 or numbers.step != 1:
        return None
    low, high, start = numbers.start, numbers[-1], 0
    for dim in range(len(before)):
        inner = math.prod(before[dim + 1 :])
        first, last = low // inner, high // inner
        if first == last:
            low, high, start = low - first * inner, high - first * inner, start + first * inner
            continue
        cut = (first + 1) * inner if low % inner else last * inner if (high + 1) % inner else None
        if cut is None:
            return None
        return 0, [range(numbers.start, start + cut), range(start + cut, numbers.stop)]
    return None


def _covering(before: Sequence[int], after: Sequence[int], region: Sequence[range]) -> list[range]:
    """Return the smallest region of one shape of a group that contains the elements of a region of the
    other."""
    numbers = _flat(after, region)
    if len(before) == 1 and numbers is not None:
        return [numbers]
    low, high = _ends(after, region)
    wanted: list[range] = []
    for dim, size in enumerate(before):
        inner = math.prod(before[dim + 1 :])
        first, last = low // inner, high // inner
        wanted.append(range(first, last + 1))
        if first != last:
            return wanted + [range(size) for size in before[dim + 1 :]]
        low, high = low - first * inner, high - first * inner
    return wanted


def _picked(
    values: Tensor,
    place: int,
    have: Sequence[range],
    before: Sequence[int],
    after: Sequence[int],
    region: Sequence[range],
) -> Tensor:
    """Return the values of a group's dimensions, from `place` on, as a region of its other shape."""
    flat = values.flatten(place, place + len(have) - 1) if have else values.unsqueeze(place)
    there, numbers = _flat(before, have), _flat(after, region)
    if there is None or numbers is None:
        raise NotImplementedError(f"{have} of {before} as {region} of {after}")  # `_pieces` rules this out
    if numbers != there:
        start = (numbers.start - there.start) // there.step
        step = max(1, numbers.step // there.step)
        index = slice(start, start + (len(numbers) - 1) * step + 1, step)
        flat = flat[(slice(None),) * place + (index,)]
    return flat.unflatten(place, [len(r) for r in region]) if region else flat.squeeze(place)


_MOVES: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten._to_copy.default: _same,
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.t.default: lambda x: _permuted(x, range(x.ndim)[::-1]),
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbound,
    aten.stack.default: _stacked,
    aten.cat.default: _joined,
    aten.view.default: lambda x, shape: _reshaped(x, _sizes(x, shape)),
    aten._unsafe_view.default: lambda x, shape: _reshaped(x, _sizes(x, shape)),
    aten.unsqueeze.default: lambda x, dim: _reshaped(x, x.like.unsqueeze(dim).shape),
    aten.squeeze.dim: lambda x, dim: _reshaped(x, x.like.squeeze(dim).shape),
}


def _sizes(x: Virtual, shape: Sequence[int]) -> Sequence[int]:
    """Return a shape with -1 replaced by the size that it stands for."""
    known = math.prod(size for size in shape if size != -1)
    return [size if size != -1 else x.numel() // max(1, known) for size in shape]
