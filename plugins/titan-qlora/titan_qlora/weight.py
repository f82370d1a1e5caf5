"""A frozen weight in NF4, as a tensor class: its values are made again wherever they are needed.

A weight first has room for its values, which are loaded into it as into any other; `quantise` then replaces
them by codes. Scales are quantized over the whole matrix, whatever a rank has of it, so that codes and scales
on any layout are the parts of those of the whole. FSDP2 gathers the codes. Products are in
`titan_qlora.products`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from titan_qlora import nf4
from titan_qlora.kernels import dequantise
from titan_qlora.nf4 import BLOCK, NESTED, Scales
from titan_qlora.products import PRODUCTS
from titancli.errors import TitanError

aten = torch.ops.aten


@dataclass(frozen=True)
class Packed:
    """The codes of a weight, or of this rank's part of it."""

    codes: Tensor
    """[…, in / 2] uint8."""
    scales: Scales
    """The scales of these codes; nested scales and offset are those of the whole weight."""
    origin: tuple[int, ...]
    """Where the part begins in the whole weight, in blocks along the last dimension."""
    width: int
    """Blocks in a row of the whole weight."""
    library: bool
    """Whether bitsandbytes dequantizes them."""

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], 2 * self.codes.shape[-1]

    def values(self, dtype: torch.dtype) -> Tensor:
        scales = nf4.dequantise_scales(self.scales, self.origin, self.width)
        return dequantise(self.codes, scales, dtype, library=self.library)

    def map(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """Return it with codes and their scales changed, which have the same rows."""
        scales = self.scales._replace(codes=change(self.scales.codes))
        return replace(self, codes=change(self.codes), scales=scales)


class Gathered(NamedTuple):
    """What FSDP2 gathers a sharded weight to: the weight, or its part on a rank of tp or ep."""

    origin: tuple[int, ...]
    """See `Packed.origin`."""
    rows: int
    each: int
    """Rows of every shard but the last ones."""


@dataclass
class Content:
    """What a weight and its aliases share."""

    full: Tensor | None = None
    """The values, until they are quantized; those of a weight on a GPU are in the CPU's memory."""
    packed: Packed | None = None
    gathered: Gathered | None = None


class NF4Weight(Tensor):
    """A weight, [out, in] or [E, out, in]; `dtype` is that of its values. Operators see the values, and
    cannot write to them once they are quantized."""

    content: Content
    is_flipped: bool
    """Whether the last two dimensions are in the other order than those of the codes."""
    bytes_per_value = 0.5 + 1 / BLOCK + 4 / BLOCK / NESTED
    """Of codes and scales, for `titan plan`."""
    rows_alone = True
    """FSDP2 gathers what is sharded along the first dimension (see `titancli.parallel.fsdp`)."""

    @staticmethod
    def __new__(
        cls,
        content: Content,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        flipped: bool = False,
    ) -> NF4Weight:
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.content, made.is_flipped = content, flipped
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        how = "not quantized yet" if self.packed is None else "quantized"
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {how})"

    @property
    def packed(self) -> Packed | None:
        return self.content.packed

    def like(self, content: Content, **changed: Any) -> NF4Weight:
        """Return a weight with other content, and what else is given changed."""
        own = {"shape": tuple(self.shape), "dtype": self.dtype, "device": self.device}
        return type(self)(content, **{**own, "flipped": self.is_flipped, **changed})

    def values(self) -> Tensor:
        """Return its values, in memory of their own once it is quantized."""
        if self.packed is not None:
            found = self.packed.values(self.dtype)
        else:
            full: Any = self.content.full
            # On meta it stands for what is quantized, whose values are made anew.
            found = (
                torch.empty_like(full, dtype=self.dtype) if full.is_meta else full.to(self.device, self.dtype)
            )
        return found.transpose(-2, -1) if self.is_flipped else found.view(self.shape)

    # ------------------------------------------------------------------------------------- operators

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS and isinstance(args[1], NF4Weight):
            return PRODUCTS[func](*args, **kwargs)
        if func is Tensor.to and kwargs.get("copy"):  # it may be written to
            args = (args[0].values(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0] if args and isinstance(args[0], NF4Weight) else None
        if weight is not None:
            if func in _SAME:
                return _same(weight, func, args, kwargs)
            if func is aten.copy_.default and isinstance(args[1], NF4Weight):
                return _copied(weight, args[1])
            if weight.packed is None:
                return _on_values(weight, func, args, kwargs)
            if func in _ON_ROWS and args[1:2] not in ((1,), (2,)):
                return _on_rows(weight, weight.packed, func, args)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, NF4Weight):
                raise TitanError(
                    f"a quantized weight cannot be written to ({func})",
                    hint="build another engine, from other weights",
                )
        return func(*tree_map_only(NF4Weight, NF4Weight.values, args), **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["_full"] if self.packed is None else ["_codes", "_scales", "_nested", "_offset"]
        return names, (type(self), self.content, self.dtype, self.is_flipped)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], settings: Any, size: Any, stride: Any) -> NF4Weight:
        kind, content, dtype, flipped = settings
        if "_full" in inner:
            made, device = replace(content, full=inner["_full"]), inner["_full"].device
        else:
            scales = Scales(inner["_scales"], inner["_nested"], inner["_offset"])
            packed = replace(content.packed, codes=inner["_codes"], scales=scales)
            made, device = replace(content, packed=packed), inner["_codes"].device
        found: NF4Weight = kind(made, tuple(size), dtype, device, flipped=flipped)
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "_full":
            return self.content.full
        packed = vars(self)["content"].packed if "content" in vars(self) else None
        inner = {"_codes": 0, "_scales": 1, "_nested": 2, "_offset": 3}
        if packed is None or name not in inner:
            raise AttributeError(name)
        return (packed.codes, *packed.scales)[inner[name]]


class NF4Shard(NF4Weight):
    """FSDP2's part of a weight. One that is not sharded lacks these methods, and FSDP2 is left out."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Packed]:
        """Return this rank's codes and their scales, padded to a common size; nothing for a single rank."""
        packed, gathered = self.packed, self.content.gathered
        if packed is None or gathered is None:
            raise TitanError("a weight is not quantized yet", hint="load its values first")
        if mesh.size() == 1:
            return (packed.codes.new_empty(0),), packed
        missing = gathered.each - len(packed.codes)
        sent = packed.map(lambda rows: torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))))
        sent = sent if missing else packed
        return (sent.codes, sent.scales.codes), replace(packed, origin=gathered.origin)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Packed,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the gathered weight; an earlier one, `out`, has its codes in the same memory."""
        if out is not None:
            return None
        whole = metadata
        gathered = self.content.gathered
        if len(all_gather_outputs) > 1 and gathered is not None:
            codes, own = (rows[: gathered.rows] for rows in all_gather_outputs)
            whole = replace(whole, codes=codes, scales=whole.scales._replace(codes=own))
        return NF4Weight(Content(packed=whole), whole.shape, param_dtype, whole.codes.device), ()


_SAME = {
    aten.detach.default,
    aten.alias.default,
    aten.view.default,
    aten.as_strided.default,
    aten.transpose.int,
    aten._to_copy.default,
}
"""Operators whose results share the content of a weight."""
_SHARDS = {
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.clone.default,
}
"""Operators of sharding: before quantization their results are weights, too."""
_FSDP2 = {aten.new_zeros.default, aten.slice.Tensor, aten.split.Tensor}
"""Those of them whose results are shards."""
_ON_ROWS = {aten.new_zeros.default, aten.slice.Tensor, aten.clone.default}
"""Those of them that FSDP2 needs afterwards, where it pads shards."""


def _same(weight: NF4Weight, func: Any, args: Any, kwargs: Any) -> NF4Weight:
    if func is aten._to_copy.default:
        device = torch.device(kwargs.get("device") or weight.device)
        dtype = kwargs.get("dtype") or weight.dtype
        content = weight.content
        if content.full is not None:
            content = replace(content, full=content.full.to(_staged(device), dtype))
        elif content.packed is not None and device != weight.device:
            packed = content.packed
            scales = Scales(*(part.to(device) for part in packed.scales))
            packed = replace(packed, codes=packed.codes.to(device), scales=scales)
            content = replace(content, packed=packed)
        return weight.like(content, dtype=dtype, device=device)
    if func is aten.transpose.int:
        dims, last = {dim % weight.ndim for dim in args[1:]}, weight.ndim - 1
        if dims != {last - 1, last}:
            raise TitanError("of a quantized weight only the last two dimensions can be transposed")
        shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2])
        return weight.like(weight.content, shape=shape, flipped=not weight.is_flipped)
    meta = torch.empty(weight.shape, device="meta")
    shape = tuple(
        (meta if func in (aten.detach.default, aten.alias.default) else func(meta, *args[1:])).shape
    )
    if shape != tuple(weight.shape) and (weight.is_flipped or len(shape) > 1):
        raise TitanError(f"a quantized weight {list(weight.shape)} cannot be viewed as {list(shape)}")
    return weight.like(weight.content, shape=shape)


def _staged(device: torch.device) -> torch.device:
    """Return where values are until they are quantized: a GPU may have no room for all of them."""
    return device if device.type == "meta" else torch.device("cpu")


def _copied(weight: NF4Weight, other: NF4Weight) -> NF4Weight:
    """Copy codes, exactly; values that are quantized again would be others."""
    mine, theirs = weight.content, other.content
    if theirs.packed is None and mine.full is not None and theirs.full is not None:
        mine.full.copy_(theirs.full)
    elif theirs.packed is None:
        raise TitanError("a quantized weight cannot be given values", hint="build another engine")
    elif mine.packed is None:
        mine.packed, mine.full, mine.gathered = theirs.packed, None, theirs.gathered
    else:
        mine.packed.codes.copy_(theirs.packed.codes)
        for own, given in zip(mine.packed.scales, theirs.packed.scales, strict=True):
            own.copy_(given)
    return weight


def _on_values(weight: NF4Weight, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute with the values of a weight that is not quantized yet."""
    device = torch.device(kwargs.get("device") or weight.device)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": _staged(device)}

    def full(one: NF4Weight) -> Tensor:
        whole: Any = one.content.full
        return one.values() if whole is None or one.is_flipped else whole.view(one.shape)

    out = func(*tree_map_only(NF4Weight, full, args), **kwargs)
    if func._schema.arguments[0].is_write:
        return weight
    if func not in _SHARDS:
        return out
    kind: Any = NF4Shard if func in _FSDP2 else type(weight)

    def around(one: Tensor) -> NF4Weight:
        made: NF4Weight = kind(Content(full=one), tuple(one.shape), one.dtype, device)
        return made

    return tree_map_only(Tensor, around, out)


def _on_rows(weight: NF4Weight, packed: Packed, func: Any, args: Any) -> NF4Weight:
    if func is aten.new_zeros.default:
        rows = args[1][:-1]
        made = packed.map(lambda one: one.new_zeros(*rows, one.shape[-1]))
    elif func is aten.slice.Tensor:
        start, end = (*args[2:], None, None)[:2]
        begin, stop, _ = slice(start, end).indices(weight.shape[0])
        made = packed.map(lambda one: one[begin:stop])
        made = replace(made, origin=(packed.origin[0] + begin, *packed.origin[1:]))
    else:
        made = packed.map(torch.clone)
    content = replace(weight.content, packed=made)
    return weight.like(content, shape=made.shape)
