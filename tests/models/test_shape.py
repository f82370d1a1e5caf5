"""A config's `shape()` has a spec of every block, and its modules declare how each parameter is sharded."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

from tests.models.by_spec import BY_SPEC
from tests.models.families import FAMILIES, Family
from titan_qwen3_next import DeltaNet
from titan_qwen3_next.delta import GatedDeltaNet
from titancli.models.blocks.declared import declared
from titancli.protocols.shape import Block
from titancli.registry.component import build

CASES = [
    *((family, name, family.flavor(name)) for family in FAMILIES for name in family.config.flavors),
    *((family, name, family.variant(name)) for family in (*FAMILIES, *BY_SPEC) for name in family.variants),
]


@pytest.mark.parametrize(
    ("family", "name", "config"), CASES, ids=[f"{family.name}-{name}" for family, name, _ in CASES]
)
def test_every_parameter_has_one_style(family: Family, name: str, config: Any) -> None:
    with torch.device("meta"):
        model = build(config, seq_len=2048)
    for parameter, _ in model.named_parameters(remove_duplicate=False):
        styles = [style for pattern, style in model.tensor_plan.items() if fnmatchcase(parameter, pattern)]
        assert len(styles) == 1, parameter
        assert (styles[0] == "expert") == (".experts." in parameter)
    assert len(model.shape.blocks) == len(model.layers)
    assert all(isinstance(block, Block) for block in model.shape.blocks)


def test_what_is_declared_of_a_child_that_is_not_there_is_left_out() -> None:
    spec = DeltaNet(dim=8, key_heads=2, heads=4, key_dim=4, value_dim=4, kernel=4, norm_eps=1e-6)
    layer = torch.nn.Sequential(GatedDeltaNet(spec))
    layer[0].wba = None
    found = declared(layer, "styles")
    assert found == {
        **dict.fromkeys(("0.conv", "0.A_log", "0.dt_bias", "0.wqkvz.weight"), "column"),
        "0.wo.weight": "row",
        "0.out_norm.weight": "norm",
    }
