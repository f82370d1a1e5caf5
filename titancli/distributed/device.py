"""The kind of device that a computation is for: that of its tensors, or while a plan is made the one that
tensors on meta stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_stood_for: str = "meta"


def device_type(tensor: Tensor) -> str:
    """Return "cpu", "cuda", …: what kernels and sizes of buffers are to be chosen by."""
    kind = tensor.device.type
    return _stood_for if kind == "meta" else kind


@contextmanager
def meta_stands_for(kind: str) -> Iterator[None]:
    """Have `device_type` say `kind` of tensors on meta inside the block."""
    global _stood_for
    before, _stood_for = _stood_for, kind
    try:
        yield
    finally:
        _stood_for = before
