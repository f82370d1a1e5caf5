"""A config's `shape()` says what the module has: every parameter, by name and shape."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

from titancli import builtin
from titancli.models.shape import Block, Decoder
from titancli.registry import current
from titancli.registry.binding import bind
from titancli.registry.component import build, component_info

FLAVORS = [
    pytest.param(config, flavor, id=f"{config.__name__}-{flavor}")
    for config in builtin.titan_components()
    if component_info(config).kind == "model" and hasattr(config, "shape")
    for flavor in config.flavors
]


def configured(config: Any, flavor: str) -> Any:
    return bind(config, config.flavors[flavor], current())


@pytest.mark.parametrize(("config", "flavor"), FLAVORS)
def test_names_shapes_and_styles_are_those_of_the_module(config: type, flavor: str) -> None:
    made = configured(config, flavor)
    shape: Decoder = made.shape()
    with torch.device("meta"):
        model = build(made, seq_len=2048)
    told = {parameter.name: parameter for parameter in shape.parameters()}
    assert {name: told[name].shape for name in told} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert shape.size == sum(parameter.numel() for parameter in model.parameters())
    for name, parameter in told.items():
        styles = [style for pattern, style in model.tensor_plan.items() if fnmatchcase(name, pattern)]
        assert parameter.style == (styles[0] if styles else "expert"), name
    for seq_len in (128, 8192):
        assert shape.flops_per_token(seq_len) == pytest.approx(model.flops_per_token(seq_len), rel=1e-12)
    assert len(shape.blocks) == len(model.layers)
    assert all(isinstance(block, Block) for block in shape.blocks)
