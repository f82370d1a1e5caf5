"""Grouped products by the hardware's float8 kernel give what emulation gives, on which other tests rest."""

from __future__ import annotations

from typing import Any

import low_cases
import pytest
import torch
from test_low_products import COUNTS, all_three, groups
from torch import Tensor

from tests.engine import cases
from tests.engine.cases import Layout
from titan_float8 import Float8Experts
from titan_float8.hardware import has
from titan_float8.products import grouped_product
from titan_float8.scheme import Scheme
from titancli.engine import Engine

HOPPER = pytest.mark.skipif(not has("float8 groups"), reason="needs a GPU of compute capability 9.0")
GPU = [pytest.mark.gpu, HOPPER]


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        pytest.param("cuda", "hopper", marks=GPU, id="hopper"),
        pytest.param("cpu", "emulated", marks=pytest.mark.slow, id="on the CPU"),
    ],
)
def test_products_of_experts_are_those_of_emulation(counts: str, device: str, kernel: Any) -> None:
    """To bf16's rounding and the kernel's fast accumulation; empty groups have zeros for gradients."""
    x, weight, ends, grad = (one.to(device) for one in groups(COUNTS[counts]))
    real, emulated = (
        all_three(lambda x, w, s=scheme: grouped_product(x, w, ends, s), x, weight, grad)
        for scheme in (Scheme("rowwise", kernel), Scheme("rowwise"))
    )
    for found, expected in zip(real, emulated, strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert off(found, expected) < 0.02
    for number, count in enumerate(COUNTS[counts]):
        assert count or not real[2][number].any()


def trained(layout: Layout) -> tuple[dict[str, Tensor], Tensor]:
    """Return the first step's gradients, and the losses of ten steps on one batch."""
    with Engine.build(cases.recipe(layout)) as made:
        made.forward_backward(cases.my_batches(made))
        gradients = {name: p.grad.detach().cpu() for name, p in made.named_parameters()}
        made.optim_step()
        return gradients, torch.tensor(low_cases.train(made, 10, one_batch=True))


@pytest.mark.parametrize(
    ("compiled", "real"),
    [
        pytest.param(False, True, marks=GPU, id="eager"),
        pytest.param(True, True, marks=GPU, id="compiled"),
        pytest.param(False, False, marks=pytest.mark.slow, id="on the CPU"),
    ],
)
def test_a_model_of_experts_trains_as_in_emulation(compiled: bool, real: bool) -> None:
    """Its gradients are no further from those without float8 than emulation's are: where sums are rounded
    otherwise before they are cast, noise as large as float8's own is between the two.

    `real`: multiply on the hardware, where there is one.
    """
    torch.compiler.reset()
    low = {"dtype": "bfloat16", "config": low_cases.EXPERTS}
    exact, _ = trained(Layout(config=low_cases.EXPERTS))
    emulated, expected = trained(Layout(**low, converters=[Float8Experts(emulate=True)]))
    converters = [Float8Experts(emulate=not real)]
    compile = "inductor" if compiled else None
    found, losses = trained(Layout(**low, converters=converters, compile=compile))
    for key, gradient in exact.items():
        noise = off(emulated[key], gradient)
        assert off(found[key], gradient) < 1.25 * noise + 0.005, key
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected, rtol=0.05, atol=0.05)
