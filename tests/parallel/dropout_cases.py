"""A converter that drops values at random, as `titan plugin new --kind converter` writes one, and what the
ranks run with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from tests.engine.cases import Layout, gradients
from titancli import component

RECOMPUTATION: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "selective"},
    {"mode": "selective", "selective_ac_option": "2"},
]


@component("converter", "dropping", target="tests.parallel.dropout_cases:DroppingConverter")
class Dropping:
    """Dropout on what the linear layers of blocks return, or their attention."""

    linears: bool = True


class DroppingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return dropout(super().forward(input), 0.3, self.training)


class DroppingConverter:
    def __init__(self, config: Dropping, *, mesh: Any = None, compile: bool = False) -> None:
        self.linears = config.linears

    def convert(self, model: Any) -> None:
        for module in model.layers.modules():
            if self.linears and type(module) is nn.Linear:
                module.__class__ = DroppingLinear
            elif not self.linears and hasattr(module, "core_attention"):
                module.register_forward_hook(lambda module, _, out: dropout(out, 0.3, module.training))

    def after_step(self, model: nn.Module) -> None:
        pass

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        return tensor


def differences(layout: Layout, ways: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The gradients that each way of recomputing changes by a single bit."""
    layout = replace(layout, converters=layout.converters or [Dropping()])
    expected = gradients(layout)
    found = {}
    for way in ways:
        torch._dynamo.reset()
        got = gradients(replace(layout, activation_checkpoint=way))
        found[str(way)] = [name for name, value in expected.items() if not torch.equal(got[name], value)]
    return found
