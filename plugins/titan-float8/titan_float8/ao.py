"""Import torchao without its irrelevant warnings.

Its warnings about compiled kernels that it cannot load concern other parts of it: float8 training is Python
on top of torch's own `_scaled_mm`. All other messages are let through.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

NOISE = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "Enum subclass and is now natively supported",
}
"""Harmless messages, by logger: a part of their text."""


@contextmanager
def ignoring_noise() -> Iterator[None]:
    filters = {}
    for name, words in NOISE.items():
        filters[name] = lambda record, words=words: words not in record.getMessage()
        logging.getLogger(name).addFilter(filters[name])
    try:
        yield
    finally:
        for name, noise in filters.items():
            logging.getLogger(name).removeFilter(noise)


with ignoring_noise():
    from torchao.float8 import CastConfig, Float8LinearConfig, precompute_float8_dynamic_scale_for_fsdp
    from torchao.float8.config import ScalingGranularity, ScalingType
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_training_tensor import (
        Float8TrainingTensor,
        GemmInputRole,
        LinearMMConfig,
        hp_tensor_and_scale_to_float8,
    )
    from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

__all__ = [
    "CastConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8TrainingTensor",
    "GemmInputRole",
    "LinearMMConfig",
    "ScalingGranularity",
    "ScalingType",
    "WeightWithDynamicFloat8CastTensor",
    "amax_to_scale",
    "hp_tensor_and_scale_to_float8",
    "precompute_float8_dynamic_scale_for_fsdp",
    "tensor_to_amax",
]
