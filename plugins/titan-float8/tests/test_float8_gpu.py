"""The hardware's float8 products give what emulation gives, on which all other tests here rest."""

from __future__ import annotations

from typing import Any

import float8_cases
import pytest
import torch
from float8_cases import RECIPES
from torch import Tensor

from tests.engine import cases
from tests.engine.cases import Layout
from titan_float8.linear import has_float8

NEEDED = pytest.mark.skipif(not has_float8(), reason="needs a GPU with float8 (compute capability 8.9)")
ROWS = [
    *(pytest.param(name, marks=[pytest.mark.gpu, NEEDED], id=name) for name in ("tensorwise", "rowwise")),
    pytest.param("rowwise_with_gw_hp", marks=[pytest.mark.gpu, NEEDED]),
    pytest.param("tensorwise", marks=pytest.mark.slow, id="tensorwise, on the CPU"),
]


def trained(layout: Layout, fields: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """The first step's gradients, and the losses of ten steps on one batch."""
    with float8_cases.engine(layout, fields) as made:
        batches = cases.my_batches(made)
        made.forward_backward(batches)
        gradients = {name: p.grad.detach().cpu() for name, p in made.named_parameters()}
        made.optim_step()
        return gradients, torch.tensor(float8_cases.train(made, 10, one_batch=True))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_gradients_and_losses_are_those_of_emulation(name: str, compiled: bool) -> None:
    """To bf16's rounding: the hardware adds up in fp32 and rounds once, emulation rounds its operands too."""
    if compiled and not has_float8():
        pytest.skip("compiled products are tried on a GPU")
    layout = Layout(dtype="bfloat16", compile="inductor" if compiled else None)
    real, emulated = (trained(layout, {**RECIPES[name], "emulate": emulate}) for emulate in (False, True))
    for key, expected in emulated[0].items():
        assert ((real[0][key] - expected).norm() / expected.norm()).item() < 0.05, key
    assert real[1][-1] < real[1][0]
    torch.testing.assert_close(real[1], emulated[1], rtol=0.05, atol=0.05)
