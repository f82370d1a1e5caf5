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

from titancli.models.blocks.declared import IMPLEMENTATIONS

Storage = torch.UntypedStorage


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
        self._inside: dict[Any, int] = {}

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
        if func in IMPLEMENTATIONS:
            self.peak = max(self.peak, self.now + self._taken_inside(func, args))
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            for tensor in plain_tensors(value):
                self._watch(tensor.untyped_storage())
        return out

    def _taken_inside(self, func: Any, args: tuple[Any, ...]) -> int:
        """Return an operator's peak memory, including its results; run once per signature."""
        key = (func, *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in args))
        if key not in self._inside:
            now, peak, self.peak = self.now, self.peak, self.now
            super().__enter__()
            try:
                IMPLEMENTATIONS[func](*args)
            finally:
                super().__exit__(None, None, None)
            self._inside[key], self.peak = self.peak - now, max(self.peak, peak)
        return self._inside[key]

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


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors inside a tensor or a traceable wrapper subclass."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


def _one(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
