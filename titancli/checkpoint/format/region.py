"""A region of a tensor, and the byte ranges that it occupies in row-major order. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Region = tuple[range, ...]
"""The selected indices along each dimension, ascending."""


def runs(region: Sequence[range], shape: Sequence[int], item: int) -> tuple[np.ndarray, int]:
    """Return the start of each contiguous run, in bytes from the tensor's first, and the bytes per run.

    Args:
        region: a non-empty region of a tensor of this shape.
        item: bytes per element.
    """
    starts, run, stride, together = np.zeros(1, dtype=np.int64), item, item, True
    for chosen, size in zip(reversed(region), reversed(shape), strict=True):
        if together and chosen.step == 1:
            starts, run = starts + chosen.start * stride, run * len(chosen)
            together = len(chosen) == size
        else:
            starts = np.add.outer(np.arange(chosen.start, chosen.stop, chosen.step) * stride, starts).ravel()
            together = False
        stride *= size
    return starts, run
