"""Count memory traffic and host synchronizations of a step, operation by operation, in a dry run.

On a GPU, everything but matrix products is bound by memory: an accidental pass over all gradients or logits
costs milliseconds and changes no number. And where the host reads a number from the device, it waits until
the device is done, and the device is then idle until the host continues.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titancli.planning.meter import plain_tensors

_aten = torch.ops.aten
KINDS = {
    "products": (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "_grouped_mm",
        "grouped_linear",
        "grouped_outer",
    ),
    "attention": ("attention",),
    "copies": ("copy", "clone", "cat", "stack", "contiguous", "chunk_cat"),
}
"""Kinds of operators, by name or part of the name; all others are "elementwise"."""
NOT_READ = {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten._foreach_copy_.default}
"""Operators that overwrite their first argument without reading it."""
LOOK_UPS = {_aten.embedding.default, _aten.index_select.default, _aten.gather.default, _aten.index.Tensor}
"""Operators that read only as much as they return."""
FREE = {
    _aten.lift_fresh.default,
    _aten._unsafe_view.default,
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.empty_strided.default,
}
"""Operators that touch no elements."""
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators that read values or counts on the host: `item`, `nonzero`, `masked_select`."""
ELSEWHERE = (str(Path(torch.__file__).parent), __file__)


class Traffic(TorchDispatchMode):
    """A mode that counts traffic and synchronizations of operators on real or fake tensors."""

    def __init__(self, on_host: set[int]) -> None:
        """Create the mode.

        Args:
            on_host: ids of tensors that are on the host on every device; reading them never waits.
        """
        super().__init__()
        self.moved: Counter[str] = Counter()
        """Bytes read and written, by kind of operator."""
        self.ops: Counter[str] = Counter()
        """Bytes read and written, by operator."""
        self.waits: Counter[str] = Counter()
        """Places where the host would wait for a device: operator and line of code."""
        self._on_host = on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _aten.lift_fresh.default or (_waits(func, args) and id(args[0]) not in self._on_host):
            self.waits[f"{func} at {_line()}"] += 1
        if not (func.is_view or func in FREE or func.namespace in ("prim", "profiler")):
            size = moved_by(func, args, kwargs or {}, out)
            self.moved[kind_of(func)] += size
            self.ops[func.overloadpacket.__name__] += size
        return out


def kind_of(func: Any) -> str:
    """Return the key of `KINDS` that an operator belongs to, or "elementwise"."""
    name = func.overloadpacket.__name__.removesuffix("_")
    for kind, names in KINDS.items():
        if name.removesuffix("_") in names or (kind != "products" and any(part in name for part in names)):
            return kind
    return "elementwise"


def _waits(func: Any, args: Any) -> bool:
    if func is _aten.index.Tensor:  # a mask needs a count, indices do not
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(WAITING & set(func.tags))


def moved_by(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    written = [*plain_tensors(out)]
    if func in LOOK_UPS:
        return 2 * sum(map(_bytes, written))
    read = [*plain_tensors((args, kwargs))]
    if func._schema.is_mutable and not written:  # returns nothing, as torch's fused optimizers do
        written = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.is_write
            for tensor in plain_tensors(value)
        ]
    if func in NOT_READ:
        over = set(map(id, plain_tensors(args[0])))
        read = [tensor for tensor in read if id(tensor) not in over]
    return sum(map(_bytes, read)) + sum(map(_bytes, written))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes behind a tensor: an expanded one has less memory than its shape suggests."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _line() -> str:
    """Return the calling line of code outside torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ELSEWHERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
