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
from titan_float8.hardware import has

NEEDED = pytest.mark.skipif(not has("float8"), reason="needs a GPU with float8 (compute capability 8.9)")
GPU = [pytest.mark.gpu, NEEDED]
ROWS = [
    *(
        pytest.param(name, compiled, marks=GPU)
        for name in ("tensorwise", "rowwise")
        for compiled in (False, True)
    ),
    pytest.param("rowwise_with_gw_hp", False, marks=GPU),
    pytest.param("tensorwise", False, marks=pytest.mark.slow, id="tensorwise, on the CPU"),
]


def trained(layout: Layout, fields: dict[str, Any] | None) -> tuple[dict[str, Tensor], Tensor]:
    """Return the first step's gradients, and the losses of ten steps on one batch."""
    with float8_cases.engine(layout, fields) as made:
        batches = cases.my_batches(made)
        made.forward_backward(batches)
        gradients = {name: p.grad.detach().double().cpu() for name, p in made.named_parameters()}
        made.optim_step()
        return gradients, torch.tensor(float8_cases.train(made, 10, one_batch=True))


@pytest.mark.parametrize(("name", "compiled"), ROWS)
def test_gradients_and_losses_are_those_of_emulation(name: str, compiled: bool) -> None:
    """No further from those without float8 than emulation's are.

    Products that are rounded once more or less before they are quantized are of another noise, as large as
    float8's own: so the two are compared with what is exact, and with each other within the sum of both.
    """
    torch.compiler.reset()
    exact, _ = trained(Layout(dtype="float32"), None)
    emulated, expected = trained(Layout(dtype="bfloat16"), {**RECIPES[name], "emulate": True})
    layout = Layout(dtype="bfloat16", compile="inductor" if compiled else None)
    real, losses = trained(layout, {**RECIPES[name], "emulate": not has("float8")})
    for key, gradient in exact.items():
        noise = distance(emulated[key], gradient)
        assert distance(real[key], gradient) < 1.25 * noise + 0.005, key
        assert distance(real[key], emulated[key]) < 1.25 * noise + 0.005, key
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected, rtol=0.05, atol=0.05)


def distance(found: Tensor, expected: Tensor) -> float:
    """‖Δ‖ / ‖expected‖."""
    return ((found - expected).norm() / expected.norm()).item()
