"""The matrix products of generation on a CPU, by oneDNN.

torch's own fp32 products are MKL's, which uses wide vector units less where few rows are multiplied, above
all on processors of other makers. oneDNN is faster still with weights in an order of its own, which takes a
copy of them. `benchmarks/sample.py` measures completions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titancli.distributed.private import linear_of_onednn, order_of_onednn
from titancli.models.blocks.head import Output

COPIED = 4 * 2**30
"""Bytes of weights that are copied at most; products with others are oneDNN's too, in torch's order."""


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Compute linear layers of a model by oneDNN inside, without gradients, where their weights are fp32 on a
    CPU; what converters have made of a layer stays. Weights must not change inside."""
    changed: list[tuple[Any, str]] = []
    modules: Iterator[Any] = model.modules() if torch.backends.mkldnn.is_available() else iter(())
    left = COPIED
    try:
        for module in modules:
            name = _product_of(module)
            if name is None or name in vars(module):
                continue
            weight = module.weight.detach()
            if type(weight) is not Tensor or weight.dtype != torch.float32 or weight.device.type != "cpu":
                continue
            if weight.nbytes <= left:
                left -= weight.nbytes
                weight = order_of_onednn(weight)
            bias = None if module.bias is None else module.bias.detach()
            vars(module)[name] = partial(_linear, weight, bias)
            changed.append((module, name))
        yield
    finally:
        for module, name in changed:
            del vars(module)[name]


def _product_of(module: Any) -> str | None:
    """Return the method of a layer that computes the product with its weight, with at most its bias added."""
    if isinstance(module, Output):
        plain = module.bias is None and type(module).matrix is Output.matrix
        return "product" if plain else None
    return "forward" if type(module).forward is nn.Linear.forward else None


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor, _: Tensor | None = None) -> Tensor:
    return linear_of_onednn(x, weight, bias)
