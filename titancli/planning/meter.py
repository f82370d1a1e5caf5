"""Count the bytes of live tensors, and their peak, operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from titancli.distributed.device import device_type
from titancli.models.blocks.declared import IMPLEMENTATIONS

Storage = torch.UntypedStorage


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """As torch composes it: rows that are masked whole become 0."""
    out, masked = x.softmax(dim, dtype), x == float("-inf")
    return out.masked_fill_(masked.all(dim, keepdim=True), 0.0)


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """As a GPU has it: a kernel that reads the product of both."""
    product = grad * output if device_type(grad) == "cuda" else None
    return torch.empty_like(grad if product is None else product, dtype=dtype)


IMPLEMENTATIONS |= {  # of torch's own operators
    torch.ops.aten._safe_softmax.default: _safe_softmax,
    torch.ops.aten._softmax_backward_data.default: _softmax_backward,
}


class Meter(TorchDispatchMode):
    """A mode that counts the storages of all tensors made under it, fake ones as if they were real.

    Reading a number out of a fake tensor gives 1. Enter it after a FakeTensorMode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes alive."""
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Storage]] = {}
        self._resize: Callable[..., Any] | None = None

    def __enter__(self) -> Meter:
        # FSDP2 frees and reallocates gathered parameters by resizing storages, which is no operation.
        self._resize = resize = Storage.resize_

        def resized(storage: Storage, size: int) -> Any:
            result = resize(storage, size)
            if id(storage) in self._sizes:
                self._count(id(storage), storage.nbytes())
            return result

        Storage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Storage.resize_ = self._resize  # type: ignore[method-assign, assignment]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _one(args[0].dtype)
        out = func(*args, **(kwargs or {}))
        for tensor in plain_tensors(out):
            self._watch(tensor.untyped_storage())
        if func in IMPLEMENTATIONS:
            self.peak = max(self.peak, self.now + taken_inside(func, args))
        return out

    def _watch(self, storage: Storage) -> None:
        key = id(storage)
        if key in self._sizes:
            return

        def gone(_: weakref.ref[Storage]) -> None:
            self._watched.pop(key)
            self.now -= self._sizes.pop(key)

        self._watched[key] = weakref.ref(storage, gone)
        self._sizes[key] = 0
        self._count(key, storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)


_INSIDE: dict[Any, int] = {}


def taken_inside(func: Any, args: tuple[Any, ...]) -> int:
    """Return a declared operator's peak temporaries, without its results; run once per signature."""
    signature = ((x.shape, x.stride(), x.dtype, device_type(x)) if isinstance(x, Tensor) else x for x in args)
    if (key := (func, *signature)) not in _INSIDE:
        meter = Meter()
        for tensor in plain_tensors(args):
            meter._watch(tensor.untyped_storage())
        meter.now = meter.peak = 0
        with meter:
            made = IMPLEMENTATIONS[func](*args)
        _INSIDE[key] = meter.peak - meter.now
        del made  # not before: `now` is its size
    return _INSIDE[key]


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors in nested containers, those inside traceable wrapper subclasses included."""
    for one in tree_iter(value):
        if is_traceable_wrapper_subclass(one):
            yield from plain_tensors([getattr(one, name) for name in one.__tensor_flatten__()[0]])
        elif isinstance(one, Tensor):
            yield one


def _one(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
