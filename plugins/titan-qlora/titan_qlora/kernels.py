"""Who dequantizes: plain torch, or bitsandbytes, with the same bits."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from titan_qlora import nf4
from titancli.errors import EnvironmentProblem

VALUES = 1 << 22
"""Values that plain torch dequantizes at a time: what it computes in is several times as large."""


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype, *, library: bool) -> Tensor:
    """Return the values of codes [..., in / 2] with scales [..., in / 64] fp32, see `titan_qlora.nf4`.

    Args:
        library: whether bitsandbytes computes them.
    """
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    if codes.is_meta or not codes.numel():
        return codes.new_empty(shape, dtype=dtype)
    if library:
        given = (codes.reshape(-1, 1), scales.flatten(), nf4.BLOCK, "nf4", shape, dtype)
        found: Tensor = bitsandbytes().dequantize_4bit.default(*given)
        return found
    made = codes.new_empty(shape, dtype=dtype)
    rows = max(1, VALUES // shape[-1])
    parts = (codes.flatten(0, -2), scales.flatten(0, -2), made.flatten(0, -2))
    for some, of_them, out in zip(*(part.split(rows) for part in parts), strict=True):
        out.copy_(nf4.dequantise(some, of_them, dtype))
    return made


def uses_library(backend: str, device: torch.device) -> bool:
    """Return whether bitsandbytes dequantizes on a device: where it is asked for, and by default on GPUs.

    Raises:
        EnvironmentProblem: it is asked for, and not installed.
    """
    there = find_spec("bitsandbytes") is not None
    if backend == "bitsandbytes" and not there:
        raise EnvironmentProblem(
            'qlora: backend = "bitsandbytes", but bitsandbytes is not installed',
            hint="pip install bitsandbytes, or remove backend",
        )
    return backend == "bitsandbytes" or (backend == "auto" and there and device.type == "cuda")


@cache
def bitsandbytes() -> Any:
    """Return bitsandbytes' operators; what it logs at import is about kernels that are not used here."""
    loud = logging.getLogger("bitsandbytes")
    before, loud.disabled = loud.disabled, True
    quiet = [logging.getLogger(f"bitsandbytes.{name}") for name in ("backends.cpu.ops", "cextension")]
    for one in quiet:
        one.disabled = True
    try:
        import bitsandbytes  # noqa: F401 - registers them
    finally:
        loud.disabled = before
        for one in quiet:
            one.disabled = False
    return torch.ops.bitsandbytes
